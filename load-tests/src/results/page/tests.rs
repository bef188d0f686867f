use expect_test::expect;
use serde_json::json;

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
                &["dormouse-load", "simulate", "--json"],
                json!({ "seeds": 5, "policies": [
                    { "name": "off", "cold": 10, "idle": { "gigabyte_hours": 0.5 } },
                    { "name": "a|b", "cold": 7, "notes": ["x", "y"] },
                ]}),
            ),
        ),
        (
            "wake".to_owned(),
            record(
                &["dormouse-load", "wake", "--json"],
                json!([{ "model": "m", "prepared": true, "wake": samples(&[1.0, 2.0, 4.0]), "none": null }]),
            ),
        ),
    ];
    expect![[r#"
        # Results

        Written by `dormouse-load results` from the JSON files in `load-tests/results`; do not edit. Every
        section says what was run, where and when. Figures are medians with the smallest and the largest
        value in parentheses. [load-tests/README.md](../load-tests/README.md) says how to repeat them.

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

        identity, batching off

        | at once | server | requests/s | p50 ms | p99 ms | CPU µs/request | RSS MiB | failed |
        |---|---|---|---|---|---|---|---|
        | 8 | dormouse | 8500 (8000–9000) | 1.05 (1.00–1.10) | 2.50 (2.00–3.00) | 45.0 (40.0–50.0) | 50.5 (50.0–51.0) | – |
        | 8 | kserve | 900 (800–1000) | 1.05 (1.00–1.10) | 2.50 (2.00–3.00) | 710 (700–720) | 50.5 (50.0–51.0) | – |

        First answers; ms

        | model | server | from process start | from a load |
        |---|---|---|---|
        | identity | kserve | 900 | – |

        Memory with copies of minilm that have answered; MiB, RSS of all processes / pages shared among processes counted by their share

        | server | 8 copies | processes |
        |---|---|---|
        | kserve | 900 / 890 | 1 |

        ### wake

        `dormouse-load wake --json`, version 0.1.0, 2000-02-29 · A processor, 2 cores, 8 GiB, Linux 6.1

        | model | none | prepared | wake |
        |---|---|---|---|
        | m | – | yes | 2.00 (1.00–4.00) |

        ## Simulated

        By the server's own decisions in virtual time; no model was run.

        ### policies

        `dormouse-load simulate --json`, version 0.1.0, 2000-02-29 · A processor, 2 cores, 8 GiB, Linux 6.1

        | measure | value |
        |---|---|
        | seeds | 5 |

        policies

        | cold | idle: gigabyte hours | name | notes |
        |---|---|---|---|
        | 10 | 0.50 | off | – |
        | 7 | – | a\|b | x; y |
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
}
