use clap::Parser;
use dormouse_client::pb;
use expect_test::expect;
use tonic::Status;

use super::*;
use crate::cli::fake::{self, FakeServer};
use crate::cli::output::OutputFormat;

#[derive(Debug, Parser)]
struct Line {
    #[command(subcommand)]
    command: ClientCommand,
}

fn command(line: &str) -> ClientCommand {
    Line::try_parse_from(line.split(' ')).unwrap().command
}

#[test]
fn the_command_line_is_consistent() {
    use clap::CommandFactory;
    Line::command().debug_assert();
}

#[test]
fn flags_reach_their_command() {
    let ClientCommand::Infer(arguments) =
        command("dormouse infer add --input a=[1] --shape a=1 --repeat 3 --timeout 2s")
    else {
        panic!("another command");
    };
    assert_eq!(arguments.inputs, ["a=[1]"]);
    assert_eq!(arguments.repeat, 3);
    assert_eq!(arguments.connection.timeout, Duration::from_secs(2));
    assert!(Line::try_parse_from(["dormouse", "infer", "add", "--repeat", "0"]).is_err());
    assert!(Line::try_parse_from(["dormouse", "stats", "--version", "1"]).is_err());
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named_with_a_way_out() {
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    let url = format!("http://127.0.0.1:{port}");
    let error = run(command(&format!("dormouse health --url {url}"))).await;
    let text = error.unwrap_err().to_string();
    assert!(
        text.starts_with(&format!("no server answers at {url}: ")),
        "{text}"
    );
    assert!(text.contains("refused"), "{text}");
    assert!(text.contains("--url or DORMOUSE_URL"), "{text}");
}

#[tokio::test]
async fn an_address_that_is_none_is_a_usage_error() {
    let code = run(command("dormouse models --url ftp://localhost")).await;
    assert_eq!(code.unwrap(), 2);
}

const TABLE: Screen = crate::cli::output::tests::PLAIN;
const JSON: Screen = Screen {
    format: OutputFormat::Json,
    ..TABLE
};

/// Adds the rows of both inputs.
fn add(request: pb::ModelInferRequest) -> Result<pb::ModelInferResponse, Status> {
    let [left, right] = &request.raw_input_contents[..] else {
        return Err(Status::invalid_argument("two inputs are needed"));
    };
    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    let pairs = left.chunks_exact(4).zip(right.chunks_exact(4));
    let sums: Vec<f32> = pairs
        .map(|(left, right)| number(left) + number(right))
        .collect();
    Ok(fake::one_output(request.model_name, "sum", &sums))
}

/// Runs a line against the fake server.
async fn executed(line: &str, screen: &Screen) -> anyhow::Result<Reply> {
    let server = FakeServer::start(add).await;
    let mut words: Vec<_> = line.split(' ').map(str::to_owned).collect();
    words.push(format!("--url=http://{}", server.address));
    execute(Line::try_parse_from(words).unwrap().command, screen).await
}

async fn shown(line: &str) -> String {
    executed(line, &TABLE).await.unwrap().text
}

async fn parsed(line: &str) -> serde_json::Value {
    let reply = executed(line, &JSON).await.unwrap();
    serde_json::from_str(&reply.text).unwrap()
}

#[tokio::test]
async fn models_are_listed_with_their_signature() {
    expect![[r"
        MODEL  VERSION  STATE        DETAIL
        add    1        READY        awake
        torn   -        UNAVAILABLE  no graph
    "]]
    .assert_eq(&shown("dormouse models").await);
    expect![[r"
        MODEL  VERSION  STATE        DETAIL    INPUTS             OUTPUTS
        add    1        READY        awake     left FP32 [-1,2]   sum FP32 [-1,2]
                                               right FP32 [-1,2]
        torn   -        UNAVAILABLE  no graph
    "]]
    .assert_eq(&shown("dormouse models --verbose").await);
    let json = parsed("dormouse models -v").await;
    assert_eq!(json[0]["inputs"][1]["name"], "right");
    assert_eq!(json[1]["state"], "UNAVAILABLE");
}

#[tokio::test]
async fn the_last_cold_start_is_a_waterfall() {
    expect![[r#"
        add version 1 woke from the prepared store, loaded in 20.0 ms, first run done after 40.0 ms, at 2023-11-14T22:13:50Z
          look-up      2.00 ms  ##
          populate     12.0 ms    ############                            60.0 MB  5.00 GB/s
          session      18.0 ms    ##################
          first-run    20.0 ms                      ####################
          loaded       20.0 ms  ####################
          total        40.0 ms  ########################################
          doing stages side by side saved 10.0 ms
    "#]]
    .assert_eq(&shown("dormouse models --timeline add").await);
    let two = shown("dormouse models --timeline add --version 1 --last 5").await;
    let heads: Vec<_> = two.lines().filter(|line| line.starts_with("add")).collect();
    assert_eq!(
        heads,
        [
            "add version 1 woke from the prepared store, loaded in 20.0 ms, first run done after 40.0 ms, at 2023-11-14T22:13:20Z, ahead of any request",
            "add version 1 woke from the prepared store, loaded in 20.0 ms, first run done after 40.0 ms, at 2023-11-14T22:13:50Z",
        ]
    );
    let json = parsed("dormouse models --timeline add --json").await;
    let cold = &json[0]["cold_starts"][0];
    assert_eq!(cold["started"], "2023-11-14T22:13:50.000Z");
    assert_eq!(cold["stages"][1]["bytes"], 60_000_000);
    assert_eq!(cold["stages"][2]["lane"], 1);
    assert_eq!(cold["overlap_seconds"], 0.01);
}

#[tokio::test]
async fn a_model_that_was_never_woken_says_so() {
    assert_eq!(
        shown("dormouse models --timeline add --version 2").await,
        "add version 2 has not been woken since its server started\n"
    );
    assert_eq!(
        shown("dormouse models --timeline add --version 3").await,
        "add version 3 has run, but its server tells of no cold start\n"
    );
    let json = parsed("dormouse models --timeline add --version 2").await;
    assert_eq!(json[0]["cold_starts"], serde_json::json!([]));
}

#[test]
fn the_timeline_has_options_of_its_own() {
    for line in [
        "dormouse models --last 2",
        "dormouse models --version 1",
        "dormouse models --timeline add --last 0",
        "dormouse models --timeline add --ready",
        "dormouse models --json --format table",
    ] {
        assert!(Line::try_parse_from(line.split(' ')).is_err(), "{line}");
    }
    let ClientCommand::Models(arguments) = command("dormouse models --timeline add --json") else {
        panic!("another command");
    };
    assert_eq!(
        arguments.connection.format.chosen(),
        Some(OutputFormat::Json)
    );
}

#[tokio::test]
async fn statistics_are_averaged() {
    expect![[r"
        MODEL  VERSION  REQUESTS  FAILED  ROWS  RUNS  ROWS/RUN  QUEUE   INPUT  COMPUTE  OUTPUT  TOTAL
        add    1        4         0       6     4     1.5       100 us  -      1.00 ms  -       2.00 ms
        times are averages per request
    "]]
    .assert_eq(&shown("dormouse stats").await);
    let json = parsed("dormouse stats add").await;
    assert_eq!(
        json[0]["inference"]["compute_infer"]["average_seconds"],
        0.001
    );
    assert_eq!(
        json[0]["inference"]["fail"]["average_seconds"],
        serde_json::Value::Null
    );
}

#[tokio::test]
async fn health_fails_for_a_model_that_cannot_answer() {
    let reply = executed("dormouse health add", &JSON).await.unwrap();
    assert!(reply.good, "{}", reply.text);
    let reply = executed("dormouse health add gone", &TABLE).await.unwrap();
    assert!(!reply.good);
    let last = reply.text.lines().last().unwrap();
    assert!(last.starts_with("model gone"), "{last}");
    assert!(
        last.ends_with("model 'gone' is not found (NotFound)"),
        "{last}"
    );
}

#[tokio::test]
async fn inference_shows_outputs_and_the_cold_start() {
    let line = "dormouse infer add --input left=[1,2] --input right=[[0.5,-2]]";
    let text = shown(line).await;
    let expected =
        "OUTPUT  TYPE  SHAPE  VALUES\nsum     FP32  [1,2]  1.5 0.0\n\nadd version 1 answered in ";
    assert!(text.starts_with(expected), "{text}");
    assert!(text.contains("it was asleep\n  read "), "{text}");
    let json = parsed(line).await;
    assert_eq!(json["outputs"][0]["data"], serde_json::json!([1.5, 0.0]));
    assert_eq!(json["cold_start"]["stages"][1]["name"], "session");
    let text = shown("dormouse infer add --fill random --repeat 3 --output sum").await;
    assert!(text.contains("answered 3 times: first "), "{text}");
}

#[tokio::test]
async fn what_makes_no_sense_is_a_usage_error() {
    for (line, expected) in [
        (
            "dormouse infer add",
            "add takes left FP32 [-1,2], right FP32 [-1,2]; give them with --input NAME=VALUE, or \
             try --fill random",
        ),
        (
            "dormouse infer add --input lefft=zeros",
            "add has no input \"lefft\" (did you mean \"left\"?); it has left FP32 [-1,2], right \
             FP32 [-1,2]",
        ),
        (
            "dormouse infer add --input left",
            "--input \"left\": expected NAME=VALUE",
        ),
        (
            "dormouse infer add --input left=zeros --shape left=1,a",
            "--shape left=1,a: expected dimensions like 1,3,224,224",
        ),
        (
            "dormouse infer add --input left=zeros --input left=zeros",
            "input \"left\" is given twice",
        ),
        (
            "dormouse infer add --fill zeros --output total",
            "add has no output \"total\"; it has sum FP32 [-1,2]",
        ),
        ("dormouse load add --config {", "--config is not JSON"),
    ] {
        let error = executed(line, &TABLE).await.unwrap_err();
        assert!(error.is::<UsageError>(), "{line}: {error}");
        assert!(error.to_string().starts_with(expected), "{line}: {error}");
    }
}

#[tokio::test]
async fn models_are_loaded_and_unloaded() {
    assert!(
        shown("dormouse load add")
            .await
            .starts_with("add loaded in ")
    );
    assert_eq!(shown("dormouse unload add").await, "add unloaded\n");
    let error = executed("dormouse load gone", &TABLE).await.unwrap_err();
    let text = error.to_string();
    assert_eq!(
        text,
        "cannot load gone: model 'gone' is not found (NotFound)"
    );
    assert!(!error.is::<UsageError>());
    let error = executed("dormouse infer add --input left=zeros", &TABLE).await;
    let text = error.unwrap_err().to_string();
    assert_eq!(
        text,
        "add gave no answer: two inputs are needed (InvalidArgument)"
    );
}
