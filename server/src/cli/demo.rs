//! `dormouse demo`: a real model wakes, answers and goes back to sleep, in a few seconds.

mod files;
mod magika;

use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use dormouse_client::{Client, ColdStart, InferRequest, RetryPolicy, Tensor};
use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::time::Instant;

use self::magika::{Answer, Magika, Prepared};
use super::output::{self, OutputFormat, Screen};

const MODEL: &str = "magika";
/// How long the model stays warm without requests: long enough to be seen, short enough to wait.
const KEEP_ALIVE: Duration = Duration::from_millis(1500);
/// How long past its keep-alive a model may take to go to sleep before that is a failure.
const PATIENCE: Duration = Duration::from_secs(10);
const MAX_BATCH: usize = 64;
const WARM_CALLS: usize = 20;

/// Wake a real model, classify files with it, and watch it go back to sleep.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Files to tell the type of [default: a dozen from the current directory]
    pub files: Vec<PathBuf>,
}

/// A running server, as the demonstration sees it.
pub trait DemoServer {
    /// Where it answers gRPC.
    fn grpc_address(&self) -> SocketAddr;
    /// Whether the model holds a session.
    fn is_warm(&self, model: &str) -> bool;
    /// Stops it, and returns when it has stopped.
    fn shutdown(self) -> impl Future<Output = anyhow::Result<()>>;
}

/// What the demonstration is made of.
#[derive(Debug)]
pub struct DemoParts {
    /// Magika's ONNX model.
    pub model: PathBuf,
    /// The `config.min.json` that belongs to it.
    pub config: PathBuf,
    /// The `content_types_kb.min.json` that belongs to it.
    pub content_types: PathBuf,
    /// The resident set of this process.
    pub resident_bytes: fn() -> Option<u64>,
}

/// Lays out a repository, starts a server on it with `start`, and shows it to the user.
pub async fn run<S: DemoServer>(
    arguments: DemoArgs,
    parts: DemoParts,
    start: impl AsyncFnOnce(&Path) -> anyhow::Result<S>,
) -> anyhow::Result<()> {
    let magika = Magika::open(&parts.config, &parts.content_types)?;
    let repository = tempfile::Builder::new()
        .prefix("dormouse-demo-")
        .tempdir()
        .context("cannot create a directory for the model repository")?;
    lay_out(repository.path(), &parts.model, &magika)?;
    let files = if arguments.files.is_empty() {
        files::varied(Path::new("."), &[&parts.model, &parts.config])
    } else {
        arguments.files
    };
    let mut prepared = Vec::new();
    for file in files {
        let features = magika.prepare(&file);
        let features = features.with_context(|| format!("cannot read {}", file.display()))?;
        prepared.push((file, features));
    }

    let server = start(repository.path()).await?;
    let model_bytes = fs::metadata(&parts.model).map_or(0, |file| file.len());
    output::print(&format!(
        "Serving {MODEL}, a model of {} that tells what kind of file some bytes are, at {}.\n\
         It is asleep. Files sent to it at once, a request each: {}.\n\n",
        output::megabytes(model_bytes),
        server.grpc_address(),
        prepared.len(),
    ))?;
    let screen = Screen::of_stdout(Some(OutputFormat::Table));
    let shown = show(&server, &magika, &prepared, (parts.resident_bytes, &screen)).await;
    // Stopped either way; what went wrong before matters more than how stopping went.
    let stopped = server.shutdown().await;
    shown?;
    stopped?;
    output::print(
        "\nTo serve your own models: dormouse serve --model-repository DIR\n\
         Each is a folder NAME/1/model.onnx; README.md has the rest.\n",
    )?;
    Ok(())
}

/// `magika/{config.pbtxt,1/model.onnx}`.
fn lay_out(repository: &Path, model: &Path, magika: &Magika) -> anyhow::Result<()> {
    let version = repository.join(MODEL).join("1");
    fs::create_dir_all(&version).with_context(|| format!("cannot create {}", version.display()))?;
    let target = version.join("model.onnx");
    fs::copy(model, &target).with_context(|| format!("cannot copy {}", model.display()))?;
    let config = format!(
        r#"name: "{MODEL}"
backend: "onnxruntime"
max_batch_size: {MAX_BATCH}
input {{ name: "bytes" data_type: TYPE_INT32 dims: {} }}
output {{ name: "target_label" data_type: TYPE_FP32 dims: {} }}
dynamic_batching {{}}
parameters {{ key: "dormouse.keep_alive" value {{ string_value: "{}ms" }} }}
"#,
        magika.feature_count(),
        magika.label_count(),
        KEEP_ALIVE.as_millis(),
    );
    let path = repository.join(MODEL).join("config.pbtxt");
    fs::write(&path, config).with_context(|| format!("cannot write {}", path.display()))
}

type Files = [(PathBuf, Prepared)];

async fn show(
    server: &impl DemoServer,
    magika: &Magika,
    files: &Files,
    (resident_bytes, screen): (fn() -> Option<u64>, &Screen),
) -> anyhow::Result<()> {
    let client = Client::builder(format!("http://{}", server.grpc_address()))
        .default_deadline(Duration::from_secs(30))
        .retry(RetryPolicy::NEVER)
        .connect()
        .await?;
    ensure!(
        !server.is_warm(MODEL),
        "the model was loaded before it was asked for"
    );
    let before = resident_bytes();

    // One request per file, all at once: they find the model asleep, wait, and run as a batch.
    let started = Instant::now();
    let answers: Vec<(Answer, Option<ColdStart>)> = stream::iter(files)
        .map(|(_, prepared)| classify(&client, magika, prepared))
        .buffered(MAX_BATCH)
        .try_collect()
        .await?;
    let cold_call = started.elapsed();
    output::print(&answer_table(files, &answers, screen))?;
    if let Some(cold) = answers.iter().find_map(|(_, cold)| cold.as_ref()) {
        output::print(&format!(
            "\nCOLD START: all answered after {}, of which waking the model took {}\n{}",
            output::duration(cold_call),
            output::duration(cold.total),
            screen.waterfall(cold),
        ))?;
    }

    if let Some((file, prepared)) = files
        .iter()
        .find(|(_, prepared)| matches!(prepared, Prepared::Features(_)))
    {
        let mut latencies = Vec::with_capacity(WARM_CALLS);
        for _ in 0..WARM_CALLS {
            let started = Instant::now();
            classify(&client, magika, prepared).await?;
            latencies.push(started.elapsed());
        }
        latencies.sort_unstable();
        output::print(&format!(
            "\nWARM: {} a call, the median of {WARM_CALLS} calls with {}\n",
            output::duration(latencies[WARM_CALLS / 2]),
            files::shown(file),
        ))?;
    }
    let warm = resident_bytes();

    let idle_since = Instant::now();
    while server.is_warm(MODEL) {
        ensure!(
            idle_since.elapsed() < KEEP_ALIVE + PATIENCE,
            "the model did not go back to sleep {} after its last request",
            output::duration(idle_since.elapsed()),
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    output::print(&format!(
        "BACK TO ZERO: asleep again {} after the last request (keep-alive {})\n",
        output::duration(idle_since.elapsed()),
        output::duration(KEEP_ALIVE),
    ))?;
    let memory = [
        ("before", before),
        ("warm", warm),
        ("after", resident_bytes()),
    ];
    output::print(&memory_lines(memory, screen))?;
    Ok(())
}

async fn classify(
    client: &Client,
    magika: &Magika,
    prepared: &Prepared,
) -> anyhow::Result<(Answer, Option<ColdStart>)> {
    let features = match prepared {
        Prepared::Answer(answer) => return Ok((answer.clone(), None)),
        Prepared::Features(features) => features,
    };
    let input = Tensor::from_slice([1, features.len() as i64], features)?;
    let request = InferRequest::new(MODEL).input("bytes", input);
    let response = client.infer(request.output("target_label")).await?;
    let scores = response.output("target_label")?.as_slice::<f32>()?;
    Ok((magika.answer(&scores)?, response.timing().cloned()))
}

fn answer_table(files: &Files, answers: &[(Answer, Option<ColdStart>)], screen: &Screen) -> String {
    let mut table = screen.table(&["file", "label", "score"]);
    for ((file, _), (answer, _)) in files.iter().zip(answers) {
        let score = answer
            .score
            .map_or_else(|| "-".to_owned(), |score| format!("{score:.3}"));
        table.add_row([files::shown(file), answer.label.clone(), score]);
    }
    output::lines(&table)
}

fn memory_lines(memory: [(&str, Option<u64>); 3], screen: &Screen) -> String {
    let most = memory.iter().filter_map(|(_, bytes)| *bytes).max();
    let Some(most) = most else {
        return String::new();
    };
    let mut text =
        "\nRESIDENT MEMORY of this process, before the model woke, while it was warm, and after\n"
            .to_owned();
    for (when, bytes) in memory {
        let Some(bytes) = bytes else { continue };
        let bar = screen.share(bytes, most);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {when:<7}  {:>9}  {bar}", output::megabytes(bytes));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_is_one_that_a_server_takes() {
        let directory = tempfile::tempdir().unwrap();
        let model = directory.path().join("some.onnx");
        fs::write(&model, b"graph").unwrap();
        let magika = Magika::parse(magika::TEST_CONFIG, magika::TEST_TYPES).unwrap();
        let repository = directory.path().join("repository");
        lay_out(&repository, &model, &magika).unwrap();
        let copied = fs::read(repository.join("magika/1/model.onnx")).unwrap();
        assert_eq!(copied, b"graph");
        let config = fs::read_to_string(repository.join("magika/config.pbtxt")).unwrap();
        expect_test::expect![[r#"
            name: "magika"
            backend: "onnxruntime"
            max_batch_size: 64
            input { name: "bytes" data_type: TYPE_INT32 dims: 20 }
            output { name: "target_label" data_type: TYPE_FP32 dims: 6 }
            dynamic_batching {}
            parameters { key: "dormouse.keep_alive" value { string_value: "1500ms" } }
        "#]]
        .assert_eq(&config);
    }

    struct Fake {
        server: crate::cli::fake::FakeServer,
        asked: std::cell::Cell<u32>,
    }

    impl DemoServer for Fake {
        fn grpc_address(&self) -> SocketAddr {
            self.server.address
        }

        /// Asleep when first asked, then warm twice, then asleep.
        fn is_warm(&self, model: &str) -> bool {
            assert_eq!(model, MODEL);
            let asked = self.asked.replace(self.asked.get() + 1);
            (1..3).contains(&asked)
        }

        async fn shutdown(self) -> anyhow::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn the_demonstration_runs_from_waking_to_sleeping() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, content: &str| {
            let path = directory.path().join(name);
            fs::write(&path, content).unwrap();
            path
        };
        let parts = DemoParts {
            model: write("model.onnx", "graph"),
            config: write("config.min.json", magika::TEST_CONFIG),
            content_types: write("types.json", magika::TEST_TYPES),
            resident_bytes: || Some(50_000_000),
        };
        let files = vec![write("main.rs", "fn main() {}"), write("nothing", "")];
        let start = async |repository: &Path| {
            assert!(repository.join("magika/config.pbtxt").is_file());
            let server = crate::cli::fake::FakeServer::start(|request| {
                assert_eq!(request.inputs[0].shape, [1, 20]);
                let scores = [0.0, 0.0, 0.0, 0.0, 0.1, 0.9];
                Ok(crate::cli::fake::one_output(
                    request.model_name,
                    "target_label",
                    &scores,
                ))
            });
            Ok(Fake {
                server: server.await,
                asked: std::cell::Cell::new(0),
            })
        };
        run(DemoArgs { files }, parts, start).await.unwrap();
    }
}
