use expect_test::expect;
use serde_json::{Value, json};

use super::*;

fn tool(words: &[&str]) -> Value {
    json!({
        "name": "dormouse-load", "version": "0.1.0", "optimised": true, "command_line": words,
    })
}

fn machine() -> Value {
    json!({ "cpu": "A processor", "cores": 2, "memory_bytes": 8u64 << 30, "kernel": "6.1" })
}

fn samples(values: &[f64]) -> Value {
    json!({ "median": null, "min": null, "max": null, "values": values })
}

fn record(words: &[&str], figures: Value) -> Document {
    let document = json!({
        "schema": 1, "tool": tool(words), "machine": machine(), "started_unix": 951_782_400,
        "seconds": 3.0, "figures": figures,
    });
    Document::parse(&document.to_string()).unwrap()
}

fn policy(name: &str, cold_starts: u64) -> Value {
    json!({ "policy": name, "outcomes": [{
        "calls": 100, "cold_starts": cold_starts, "joined_loads": 0, "parked_wakes": 1,
        "idle_model_hours": 2.0, "parked_model_hours": 1.0, "prewarms": 0, "prewarms_wasted": 0,
        "evicted_parked": 0, "evicted_closed": 0, "memory_waits": 0, "peak_bytes": 0,
    }]})
}

fn comparison() -> Document {
    let cell = |server: &str, throughput: &[f64], cpu: &[f64]| {
        json!({
            "server": server, "workload": "identity", "batching": "off", "concurrency": 8,
            "throughput": samples(throughput), "p50": samples(&[1.0, 1.1]),
            "p99": samples(&[2.0, 3.0]), "cpu_micros": samples(cpu),
            "resident_mib": samples(&[50.0, 51.0]), "failed": 0,
        })
    };
    let server =
        |name: &str, recipe: &str| json!({ "name": name, "recipe": recipe, "protocol": "grpc" });
    let document = json!({
        "schema": 1, "tool": tool(&["dormouse-load", "compare"]), "machine": machine(),
        "started_unix": 0, "seconds": 60.0, "side_by_side": false,
        "plan": {
            "concurrency": [8], "duration": "1s", "warmup": "300ms", "repetitions": 2,
            "batching": ["off"], "max_batch": 8, "batch_delay": "1ms", "threads": 2,
            "servers": [server("dormouse", "dormouse"), server("kserve", "kserve"), server("triton", "triton")],
            "workloads": [{ "name": "identity", "model": "identity" }],
        },
        "servers": [
            { "name": "dormouse", "title": "Dormouse", "versions": ["dormouse 0.1.0"], "notes": "As it comes." },
            { "name": "kserve", "title": "KServe", "versions": ["kserve==0.21.0"], "notes": "One process." },
        ],
        "absent": [{ "server": "triton", "part": "installation", "reason": "tritonserver is not on the PATH" }],
        "load": [cell("dormouse", &[8000.0, 9000.0], &[50.0, 40.0]), cell("kserve", &[800.0, 1000.0], &[700.0, 720.0])],
        "starts": [{
            "server": "kserve", "model": "identity",
            "from_start": samples(&[900.0]), "from_load": samples(&[]),
        }],
        "memory": [{
            "server": "kserve", "model": "minilm", "copies": 8, "processes": 1,
            "resident_mib": samples(&[900.0]), "proportional_mib": samples(&[890.0]),
        }],
    });
    Document::parse(&document.to_string()).unwrap()
}

#[test]
fn page_keeps_measured_and_simulated_apart() {
    let documents = [
        ("peers".to_owned(), comparison()),
        (
            "policies".to_owned(),
            record(
                &["dormouse-load", "simulate"],
                json!({
                    "simulated": true, "functions": 3, "minutes": 60, "calls": 100, "model_mb": 440,
                    "parked_mb": 17, "budget_models": null,
                    "rows": [policy("off", 10), policy("a|b", 7)],
                }),
            ),
        ),
        (
            "storm".to_owned(),
            record(
                &["dormouse-load", "storm", "--json"],
                json!({
                    "model": "m", "requests": 1000, "single": samples(&[10.0, 12.0]),
                    "first": samples(&[13.0, 14.0]), "last": samples(&[2000.0, 2500.0]),
                    "loads": [1.0, 2.0], "errors": [], "store": "1 entry",
                }),
            ),
        ),
    ];
    expect![[r#"
        # Results

        Written by `dormouse-load results` from the JSON files in `load-tests/results`; do not edit. Every
        section says what was run, where and when. Figures are medians with the smallest and the largest
        value in parentheses; a single value was measured once. Client and server share the machine.
        [load-tests/README.md](../load-tests/README.md) says how to repeat them.

        ## Bars

        What is promised, and whether it was kept. An aim is not a promise.

        | measurement | met | missed | not judged | aims met |
        |---|---|---|---|---|
        | [storm](#storm) | 1 | 2 | 0 | – |

        Missed

        | measurement | bar | wanted | found |
        |---|---|---|---|
        | storm | loads per storm | 1 each | 1.50 (1.00–2.00) |
        | storm | first answer/single wake | at most 1.10× | 1.23× |

        ## Measured

        On real servers and real models, by the clock.

        ### peers

        `dormouse-load compare`, version 0.1.0, 1970-01-01 · A processor, 2 cores, 8 GiB, Linux 6.1

        2 rounds, 1s per measurement after 300ms of warm-up, 2 threads per operator. Client and servers share the machine.

        - **dormouse**: Dormouse (dormouse 0.1.0). As it comes.
        - **kserve**: KServe (kserve==0.21.0). One process.
        - **triton** did not take part (Installation): tritonserver is not on the PATH

        How many times the throughput of each server the baseline has; batching off; baseline of the same protocol: dormouse

        | workload | at once | kserve |
        |---|---|---|
        | identity | 8 | 9.50 (9.00–10.0) |

        How many times the processor time per request of the baseline each server takes; batching off; baseline of the same protocol: dormouse

        | workload | at once | kserve |
        |---|---|---|
        | identity | 8 | 16.0 (14.0–18.0) |

        Where the baseline is behind

        | workload | batching | at once | server | measure | baseline/server |
        |---|---|---|---|---|---|
        | nowhere | – | – | – | – | – |

        identity, batching off; ÷ is the baseline's value divided by this server's, the median of the rounds; n is the smallest number of answers in a round where it is below 100

        | at once | server | requests/s | ÷ | p50 ms | ÷ | p99 ms | ÷ | CPU µs/request | ÷ | RSS MiB | failed |
        |---|---|---|---|---|---|---|---|---|---|---|---|
        | 8 | dormouse | 8500 (8000–9000) | – | 1.05 (1.00–1.10) | – | 2.50 (2.00–3.00) | – | 45.0 (40.0–50.0) | – | 50.5 (50.0–51.0) | – |
        | 8 | kserve | 900 (800–1000) | 9.50 | 1.05 (1.00–1.10) | 1.00 | 2.50 (2.00–3.00) | 1.00 | 710 (700–720) | 0.06 | 50.5 (50.0–51.0) | – |

        First answers; ms

        | model | server | from process start | from a load |
        |---|---|---|---|
        | identity | kserve | 900 | – |

        Memory with copies of minilm that have answered; MiB, RSS of all processes / pages shared among processes counted by their share

        | server | 8 copies | processes |
        |---|---|---|
        | kserve | 900 / 890 | 1 |

        ### storm

        `dormouse-load storm --json`, version 0.1.0, 2000-02-29 · A processor, 2 cores, 8 GiB, Linux 6.1

        1000 requests at once on m, which sleeps, 2 times; before each of them a single request wakes it; 1 entry. The ratio is the median over the repetitions.

        | measure | value |
        |---|---|
        | answer of a single request, ms | 11.0 (10.0–12.0) |
        | first answer of a storm, ms | 13.5 (13.0–14.0) |
        | first/single | 1.23× |
        | of the first answer: loading, ms | – |
        | of the first answer: until its run, ms | – |
        | of the first answer: running, ms | – |
        | last answer of a storm, s | 2.25 (2.00–2.50) |
        | loads per storm | 1.50 (1.00–2.00) |
        | errors | 0 |

        Bars

        | bar | wanted | found | verdict |
        |---|---|---|---|
        | loads per storm | 1 each | 1.50 (1.00–2.00) | MISSED |
        | requests without an answer | 0 | 0 | met |
        | first answer/single wake | at most 1.10× | 1.23× | MISSED |

        ## Simulated

        By the server's own decisions in virtual time; no model was run.

        ### policies

        `dormouse-load simulate`, version 0.1.0, 2000-02-29 · A processor, 2 cores, 8 GiB, Linux 6.1

        Simulated: 3 functions, 60 minutes, 100 calls; a model holds 440 MB warm and 17 MB parked. Median (smallest–largest) of 1 draws of the calls within their minutes.

        | policy | cold starts | cold, % of calls | parked wakes | warm idle, model·h | parked, model·h | idle memory, GB·h | pre-warms | wasted |
        |---|---|---|---|---|---|---|---|---|
        | off | 10 | 10.000 | 1 | 2.0 | 1.0 | 0.9 | 0 | 0 |
        | a\|b | 7 | 7.000 | 1 | 2.0 | 1.0 | 0.9 | 0 | 0 |
    "#]].assert_eq(&page(&documents));
}

#[test]
fn page_without_files_says_so() {
    let text = page(&[]);
    assert_eq!(text.matches("Nothing is recorded yet.").count(), 2);
}

#[test]
fn files_of_another_kind_are_refused() {
    for (document, words) in [
        (r#"{"figures": 1}"#, "no schema"),
        (r#"{"schema": 1}"#, "neither"),
        ("[]", "no schema"),
        (r#"{"schema": 1, "figures": 1, "x": 1}"#, "unknown field"),
    ] {
        let error = format!("{:#}", Document::parse(document).unwrap_err());
        assert!(error.contains(words), "{error}");
    }
    for (command, words) in [("echo", "no command"), ("storm", "figures of `storm`")] {
        let document = json!({
            "schema": 1, "tool": tool(&["dormouse-load", command]), "machine": machine(),
            "figures": 1,
        });
        let error = format!("{:#}", Document::parse(&document.to_string()).unwrap_err());
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn bars_that_were_recorded_are_not_judged_again() {
    let bar =
        json!({ "name": "a bar", "wanted": "0", "found": "1", "met": false, "kind": "speed" });
    let document = json!({
        "schema": 1, "tool": tool(&["dormouse-load", "storm"]), "machine": machine(),
        "bars": [bar], "figures": {},
    });
    let document = Document::parse(&document.to_string()).unwrap();
    let names: Vec<&str> = document.bars().iter().map(|bar| &*bar.name).collect();
    assert_eq!(names, ["a bar"]);
    let text = page(&[("storms".to_owned(), document)]);
    assert!(text.contains("| storms | a bar | 0 | 1 |"), "{text}");
    assert!(text.contains("| a bar | 0 | 1 | MISSED |"), "{text}");
}
