//! Runs against a server in this process.

mod server;

use std::time::Duration;

use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

use self::server::TestServer;
use super::outcome::Outcome;
use super::plot::PlotFormat;
use super::progress::Progress;
use super::scenario::tests::files;
use super::scenario::{Arrivals, Bursts, Cancel, Check, MadeCold, Mode, Order, Scenario};
use super::target::{DataForm, Protocol, Target};
use super::{plot, report, run};

/// The same scenario, over in a moment.
fn brief(mut scenario: Scenario) -> Scenario {
    scenario.duration = Duration::from_millis(300);
    // With a warm-up, a busy machine may leave nothing to be measured.
    scenario.warmup = Duration::ZERO;
    scenario.timeout = Duration::from_secs(120);
    if scenario.name != "deadlines" {
        for model in &mut scenario.models {
            model.deadline = model.deadline.map(|_| scenario.timeout);
        }
    }
    scenario.window = Duration::from_millis(100);
    scenario.cold.repetitions = 2;
    scenario.closed.concurrency.truncate(2);
    scenario.open.rates.truncate(1);
    scenario
}

async fn outcome(scenario: &Scenario, target: &Target) -> Outcome {
    run(scenario, target, &Progress::quiet()).await.unwrap()
}

fn short_closed() -> Scenario {
    brief(Scenario::closed("mlp", &[2]))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_scenario_runs() {
    let awake = TestServer::start(&["--keep-alive=forever"]).await;
    let sleepy = TestServer::start(&["--keep-alive=50ms", "--park-after=never"]).await;
    for path in files() {
        let scenario = brief(Scenario::open(&path).unwrap());
        let server = match scenario.mode {
            Mode::Cold => &sleepy,
            _ => &awake,
        };
        let outcome = outcome(&scenario, &server.grpc()).await;
        let name = &scenario.name;
        assert!(!outcome.ended_early && !outcome.any_wrong(), "{name}");
        for step in &outcome.steps {
            let all = &step.all;
            assert!(all.sent > 0, "{name}: {step:?}");
            let ends = all.answered + all.wrong + all.cancelled + all.failed();
            assert_eq!(all.sent, ends, "{name}");
            let models: u64 = step.models.values().map(|figures| figures.sent).sum();
            assert_eq!(all.sent, models, "{name}");
            let windows: u64 = step.windows.iter().map(|window| window.sent).sum();
            assert_eq!(all.sent, windows, "{name}");
            match name.as_str() {
                "deadlines" => {}
                _ => {
                    assert_eq!(all.failed(), 0, "{name}: {:?}", step.error_examples);
                    assert!(all.answered > 0, "{name}");
                }
            }
        }
        if name == "cold-start" {
            let [step] = &outcome.steps[..] else {
                panic!("one step");
            };
            assert_eq!(step.cold.len(), 4);
            assert!(step.cold.iter().all(|cold| cold.woke.is_some()));
        }
        report::print(&outcome).unwrap();
    }
    awake.stop().await;
    sleepy.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http_is_spoken_with_binary_and_with_json_tensors() {
    let server = TestServer::start(&[]).await;
    let scenario =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/mixed-models.toml");
    let scenario = brief(Scenario::open(&scenario).unwrap());
    for (data, told) in [
        (DataForm::Auto, "binary"),
        (DataForm::Binary, "binary"),
        (DataForm::Json, "json"),
    ] {
        let target = Target {
            data,
            ..server.http()
        };
        let outcome = outcome(&scenario, &target).await;
        assert_eq!(outcome.server.data, told);
        let all = &outcome.steps[0].all;
        assert!(all.answered > 0 && all.wrong == 0, "{all:?}");
        assert_eq!(all.failed(), 0, "{:?}", outcome.steps[0].error_examples);
        assert!(outcome.steps[0].models["add_sub"].answered > 0);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_answers_are_found() {
    let server = TestServer::start(&[]).await;
    let folder = tempfile::tempdir().unwrap();
    let wrong = folder.path().join("wrong.json");
    let document =
        r#"{"outputs":[{"name":"OUTPUT0","datatype":"INT32","shape":[1,1],"data":[1]}]}"#;
    std::fs::write(&wrong, document).unwrap();
    let mut scenario = short_closed();
    scenario.models[0].name = "add_sub".to_owned();
    let recorded = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("scenarios/recorded/add_sub_request.json");
    scenario.models[0].recorded = Some(recorded);
    scenario.models[0].expected = Some(wrong);
    for target in [server.grpc(), server.http()] {
        let outcome = outcome(&scenario, &target).await;
        assert!(outcome.any_wrong());
        let words = &outcome.steps[0].mismatches[0];
        assert!(
            words.contains("INT32 [1, 16] instead of INT32 [1, 1]"),
            "{words}"
        );
    }
    server.stop().await;
}

/// A folder of requests to `add_sub` with their answers, of which each is another.
fn recorded_pairs(folder: &std::path::Path) {
    for number in 0..4 {
        let tensor = |name: &str, value: i32| {
            let data = [value; 16];
            format!(r#"{{"name":"{name}","datatype":"INT32","shape":[1,16],"data":{data:?}}}"#)
        };
        let write = |what: &str, key: &str, tensors: [String; 2]| {
            let text = format!(r#"{{"{key}":[{}]}}"#, tensors.join(","));
            std::fs::write(folder.join(format!("{number}_{what}.json")), text).unwrap();
        };
        let inputs = [tensor("INPUT0", 10 * number), tensor("INPUT1", number)];
        write("request", "inputs", inputs);
        let outputs = [
            tensor("OUTPUT0", 11 * number),
            tensor("OUTPUT1", 9 * number),
        ];
        write("response", "outputs", outputs);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_of_many_recorded_requests_has_its_own_answer() {
    let flags = ["--model-control-mode=explicit", "--load-model=add_sub"];
    let server = TestServer::start(&flags).await;
    let folder = tempfile::tempdir().unwrap();
    recorded_pairs(folder.path());
    let mut scenario = brief(Scenario::closed("add_sub", &[2]));
    scenario.models[0].recorded = Some(folder.path().to_owned());
    scenario.cold.repetitions = 12;
    let swap = |one: &str, other: &str| {
        let [one, other] = [one, other].map(|name| folder.path().join(name));
        let text = std::fs::read(&one).unwrap();
        std::fs::copy(&other, &one).unwrap();
        std::fs::write(&other, text).unwrap();
    };
    for mode in [Mode::Closed, Mode::Cold] {
        scenario.mode = mode;
        for order in [Order::Random, Order::Sequential] {
            scenario.models[0].order = order;
            for target in [server.grpc(), server.http()] {
                let outcome = outcome(&scenario, &target).await;
                let [step] = &outcome.steps[..] else {
                    panic!("one step");
                };
                assert!(!outcome.any_wrong(), "{mode:?} {:?}", step.mismatches);
                assert!(step.all.answered > 0, "{:?}", step.error_examples);
            }
        }
    }
    // In order, so that the wrong ones are among those asked.
    swap("1_response.json", "2_response.json");
    let outcome = outcome(&scenario, &server.grpc()).await;
    let step = &outcome.steps[0];
    assert_eq!((step.all.wrong, step.all.answered), (6, 6), "{step:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_requests_are_compared_with_their_first_answers() {
    let server = TestServer::start(&[]).await;
    let mut scenario = short_closed();
    scenario.models[0].check = Check::Consistent;
    scenario.models[0].variants = 3;
    for target in [server.grpc(), server.http()] {
        let outcome = outcome(&scenario, &target).await;
        let step = &outcome.steps[0];
        assert!(!outcome.any_wrong(), "{:?}", step.mismatches);
        assert!(step.all.answered > 3, "{step:?}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn inputs_agree_in_sizes_of_one_name_and_are_refused_otherwise() {
    let server = TestServer::start(&[]).await;
    let load = |shape: &str| {
        let text = format!(
            "name = 'x'\nmode = 'closed'\n[[models]]\nname = 'minilm'\n{shape}\n\
             [[models]]\nname = 'add_sub'\nshapes = {{ INPUT0 = ['N', 16], INPUT1 = ['N', 16] }}\n\
             dims = {{ N = {{ 1 = 1, 2 = 1, 8 = 2 }} }}\n"
        );
        brief(Scenario::parse(&text).unwrap())
    };
    let named = load(
        "dims = { N = [1, 2, 4], L = { median = 20, sigma = 1, from = 4, to = 64 } }\n\
         shapes.input_ids = ['N', 'L']\nshapes.attention_mask = ['N', 'L']\n\
         shapes.token_type_ids = ['N', 'L']",
    );
    for target in [server.grpc(), server.http()] {
        let outcome = outcome(&named, &target).await;
        for step in &outcome.steps {
            assert_eq!(step.all.failed(), 0, "{:?}", step.error_examples);
            assert!(step.all.answered > 0, "{step:?}");
        }
    }
    let unnamed = load(
        "shapes.input_ids = [1, '2..64']\nshapes.attention_mask = [1, '2..64']\n\
         shapes.token_type_ids = [1, '2..64']",
    );
    let outcome = outcome(&unnamed, &server.grpc()).await;
    let models = &outcome.steps[0].models;
    assert!(models["minilm"].failed() > 0, "{models:?}");
    assert_eq!(models["add_sub"].failed(), 0, "{models:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_unloaded_and_loaded_again() {
    let flags = ["--model-control-mode=explicit", "--load-model=mlp"];
    let server = TestServer::start(&flags).await;
    let mut scenario = brief(Scenario::closed("mlp", &[1]));
    scenario.mode = Mode::Cold;
    scenario.cold.how = MadeCold::Unload;
    for target in [server.grpc(), server.http()] {
        let outcome = outcome(&scenario, &target).await;
        let cold = &outcome.steps[0].cold;
        assert_eq!(cold.len(), 2, "{:?}", outcome.steps[0].error_examples);
        assert!(
            cold.iter()
                .all(|one| one.load.is_some_and(|load| load < one.latency))
        );
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_beyond_the_bound_are_counted() {
    let server = TestServer::start(&[]).await;
    let mut scenario = brief(Scenario::closed("steady", &[1]));
    scenario.mode = Mode::Open;
    scenario.open.arrivals = Arrivals::Bursts;
    scenario.open.rates = vec![0.0];
    scenario.open.max_outstanding = 3;
    scenario.open.bursts = Some(Bursts {
        size: 20,
        every: Duration::from_secs(10),
    });
    let outcome = outcome(&scenario, &server.grpc()).await;
    let all = &outcome.steps[0].all;
    assert_eq!(all.sent + all.not_sent, 20);
    assert!(all.not_sent > 0 && all.sent >= 3, "{all:?}");
    assert!(outcome.any_failed());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_give_up_and_deadlines_pass() {
    let server = TestServer::start(&[]).await;
    for target in [server.grpc(), server.http()] {
        let mut scenario = brief(Scenario::closed("steady", &[8]));
        scenario.models[0].cancel = Some(Cancel {
            fraction: 1.0,
            after: Duration::from_millis(1),
        });
        let given_up = outcome(&scenario, &target).await;
        assert!(given_up.steps[0].all.cancelled > 0, "{given_up:?}");
        scenario.models[0].cancel = None;
        scenario.models[0].deadline = Some(Duration::from_millis(1));
        let late = outcome(&scenario, &target).await;
        assert!(late.steps[0].all.failed() > 0, "{late:?}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_can_be_ended_early() {
    let server = TestServer::start(&[]).await;
    let mut scenario = Scenario::closed("mlp", &[2, 4]);
    scenario.duration = Duration::from_secs(3600);
    scenario.warmup = Duration::ZERO;
    for mode in [Mode::Closed, Mode::Open] {
        scenario.mode = mode;
        let (progress, stopper) = Progress::live();
        let before = server.answered();
        let stop = async {
            // Without an answer the run must end all the same, for its errors to be seen.
            for _ in 0..12_000 {
                if server.answered() > before {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            stopper.stop();
        };
        let target = server.grpc();
        let (outcome, ()) = tokio::join!(run(&scenario, &target, &progress), stop);
        let outcome = outcome.unwrap();
        assert!(outcome.ended_early);
        let [step] = &outcome.steps[..] else {
            panic!("the second step is not begun");
        };
        assert!(step.seconds < 3600.0, "{step:?}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_say_what_was_measured() {
    let server = TestServer::start(&[]).await;
    let mut target = server.grpc();
    target.pid = Some(std::process::id());
    let outcome = outcome(&short_closed(), &target).await;
    server.stop().await;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    report::write_json(&outcome, &path("run.json")).unwrap();
    let text = std::fs::read_to_string(path("run.json")).unwrap();
    let mut again: Outcome = serde_json::from_str(&text).unwrap();
    assert!(again.intervals.is_empty());
    again.intervals.clone_from(&outcome.intervals);
    assert_eq!(again.steps[0].all.sent, outcome.steps[0].all.sent);
    assert_eq!(again.scenario, outcome.scenario);
    let process = again.steps[0].process.unwrap();
    assert!(process.resident_bytes > 0, "{process:?}");
    report::write_hdr(&outcome, &path("run.hlog")).unwrap();
    let log = std::fs::read(path("run.hlog")).unwrap();
    let histograms = IntervalLogIterator::new(&log)
        .filter(|entry| matches!(entry, Ok(LogEntry::Interval(one)) if one.tag().is_some()))
        .count();
    assert_eq!(histograms, outcome.intervals.len());
    assert!(histograms > 0);
    for (format, endings) in [
        (PlotFormat::Svg, &["svg"][..]),
        (PlotFormat::Png, &["png"]),
        (PlotFormat::Both, &["png", "svg"]),
    ] {
        let folder = path(&format!("plots in {format:?}"));
        plot::write(&outcome, &folder, format).unwrap();
        let files = std::fs::read_dir(&folder).unwrap();
        let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        files.sort_unstable();
        let names = ["latency", "time"].into_iter();
        let wanted = names.flat_map(|name| endings.iter().map(move |end| format!("{name}.{end}")));
        assert_eq!(
            files,
            wanted.map(|name| folder.join(name)).collect::<Vec<_>>()
        );
        for file in files {
            let bytes = std::fs::read(&file).unwrap();
            match file.extension().is_some_and(|end| end == "svg") {
                true => assert!(String::from_utf8(bytes).unwrap().contains("<polyline")),
                false => assert!(bytes.starts_with(b"\x89PNG\r\n")),
            }
        }
    }
}

#[tokio::test]
async fn only_loopback_is_driven_unless_allowed() {
    let target = Target::at("grpc://192.0.2.1:8001");
    let error = run(&short_closed(), &target, &Progress::quiet()).await;
    let error = format!("{:#}", error.unwrap_err());
    assert!(error.contains("--allow-remote"), "{error}");
    for (url, words) in [
        ("127.0.0.1:8001", "http:// or https://"),
        ("grpc://127.0.0.1", "a host and a port"),
        ("http://127.0.0.1:1", "cannot connect"),
    ] {
        let error = run(&short_closed(), &Target::at(url), &Progress::quiet()).await;
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains(words), "{url}: {error}");
    }
    let target = Target {
        protocol: Some(Protocol::Grpc),
        ..Target::at("http://localhost:8001")
    };
    assert_eq!(target.spoken().unwrap(), Protocol::Grpc);
    target.check_place().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_model_lacks_is_named() {
    let server = TestServer::start(&[]).await;
    let mut scenario = short_closed();
    scenario.models[0].values.insert("Z".to_owned(), [0.0, 1.0]);
    let error = run(&scenario, &server.grpc(), &Progress::quiet()).await;
    let error = format!("{:#}", error.unwrap_err());
    assert!(error.contains("no input 'Z'; it has X"), "{error}");
    scenario.models[0].name = "absent".to_owned();
    for target in [server.grpc(), server.http()] {
        let error = run(&scenario, &target, &Progress::quiet()).await;
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains("signature of model 'absent'"), "{error}");
    }
    server.stop().await;
}
