//! Two Dormouse processes with different flags, as a comparison that needs nothing else.

use super::*;

const TWO: &str = r#"
concurrency = [1, 4]
duration = "100ms"
warmup = "20ms"
repetitions = 2
batching = ["off", "on"]
max_batch = 4
batch_delay = "0ms"
threads = 1

[[servers]]
name = "prepared"
recipe = "dormouse"
protocol = "grpc"

[[servers]]
name = "unprepared"
recipe = "dormouse"
protocol = "grpc"
flags = ["--prepared-store=false"]

[[servers]]
name = "over-http"
recipe = "dormouse"
protocol = "http"
tables = ["load"]

[[workloads]]
name = "tiny"
model = "tiny"

[cold]
models = ["tiny"]
repetitions = 1
loads = 1
copies = [1, 2]
copied = "tiny"
"#;

/// Whether there is a server to compare; tests of this package alone do not build it.
fn is_built() -> bool {
    match crate::process::ServerProcess::binary() {
        Ok(_) => true,
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "{error}");
            eprintln!("skipped: {error}");
            false
        }
    }
}

async fn two(side_by_side: bool) -> Option<Comparison> {
    if !is_built() {
        return None;
    }
    let mut plan = Plan::parse(TWO).unwrap();
    if side_by_side {
        plan.repetitions = 1;
        plan.cold = None;
    }
    Some(compare(plan, side_by_side, false).await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_servers_are_compared_in_every_respect() {
    let Some(found) = two(false).await else {
        return;
    };
    assert!(found.absent.is_empty(), "{:?}", found.absent);
    assert_eq!(found.load.len(), 3 * 2 * 2);
    for cell in &found.load {
        assert_eq!(cell.throughput.0.len(), 2, "{cell:?}");
        assert_eq!(cell.cpu_micros.0.len(), 2, "{cell:?}");
        assert_eq!(cell.failed, 0, "{cell:?}");
        assert!(cell.resident_mib.min() > Some(1.0), "{cell:?}");
    }
    assert_eq!(found.starts.len(), 2);
    for cell in &found.starts {
        assert_eq!((cell.from_start.0.len(), cell.from_load.0.len()), (1, 1));
    }
    assert_eq!(found.memory.len(), 2 * 3);
    let of = |copies: usize| {
        let mut cells = found.memory.iter();
        let cell = cells.find(|cell| cell.server == "prepared" && cell.copies == copies);
        cell.unwrap().resident_mib.median().unwrap()
    };
    assert!(of(1) > of(0), "{:?}", found.memory);
    let document = serde_json::to_string(&found).unwrap();
    assert_eq!(
        serde_json::from_str::<Comparison>(&document).unwrap(),
        found
    );
    let titles: Vec<String> = report::tables(&found)
        .into_iter()
        .map(|t| t.title)
        .collect();
    assert_eq!(titles.len(), 4 + 1 + 2 + 2, "{titles:?}");
    report::print(&found).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_run_side_by_side_are_measured_in_turns() {
    let Some(found) = two(true).await else {
        return;
    };
    assert!(found.side_by_side && found.absent.is_empty());
    assert_eq!(found.load.len(), 3 * 2 * 2);
    assert!(found.load.iter().all(|cell| cell.throughput.0.len() == 1));
}

#[tokio::test]
async fn server_that_cannot_take_part_is_told_with_its_reason() {
    if !is_built() {
        return;
    }
    let mut plan = Plan::parse(TWO).unwrap();
    plan.servers[1].flags = vec!["--no-such-flag".to_owned()];
    plan.servers.truncate(2);
    plan.batching.truncate(1);
    plan.cold = None;
    let found = compare(plan, false, false).await.unwrap();
    let [absent] = &found.absent[..] else {
        panic!("{:?}", found.absent)
    };
    assert_eq!((&*absent.server, absent.part), ("unprepared", Part::Load));
    assert!(absent.reason.contains("--no-such-flag"), "{absent:?}");
    assert!(found.load.iter().all(|cell| cell.server == "prepared"));
}

#[test]
fn names_that_a_plan_does_not_have_are_refused() {
    let known = ["a".to_owned(), "b".to_owned()];
    assert!(choose(&["a".to_owned()], &known, "server").is_ok());
    let error = choose(&["c".to_owned()], &known, "server").unwrap_err();
    assert_eq!(error.to_string(), "there is no server 'c'; there are a, b");
}
