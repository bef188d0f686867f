//! Models in processes of their own: killed, crashed, stopped and hung for real, while others
//! serve on.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinHandle;
use tonic::Code;

use crate::deadlines::{ENDLESS, ONE_AT_A_TIME, with_timeout};
use crate::generated::{Generated, TestStore, parameters, preparations, settled};
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, eventually};
use crate::wire::{self, GrpcClient, Request, add_sub, index_state, output, slow};

const ISOLATED: &str =
    r#"parameters { key: "dormouse.isolation" value { string_value: "process" } }"#;

/// A configuration file beside the repository.
struct ConfigFile(tempfile::TempDir);

impl ConfigFile {
    fn new(text: &str) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        fs::write(dir.path().join("server.toml"), text)?;
        Ok(Self(dir))
    }

    fn flag(&self) -> String {
        format!("--config={}", self.path().display())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("server.toml")
    }
}

/// The process that a model runs in, if the index names one.
async fn worker_of(client: &GrpcClient, model: &str) -> Result<Option<u32>> {
    let (_, reason) = index_state(client, model, "").await?;
    let pid = reason.split_once("in worker ").map(|(_, pid)| pid.parse());
    Ok(pid.transpose()?)
}

fn signal(pid: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(pid.try_into()?).context("a process id is not zero")?;
    kill_process(pid, signal).context("cannot signal a worker")
}

fn is_gone(pid: u32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
}

async fn is_ready(server: &TestServer, model: &str) -> Result<bool> {
    let path = format!("/v2/models/{model}/ready");
    Ok(server.get(&path).await?.status == 200)
}

/// Calls a model again and again until told to stop, and returns how often it answered.
fn busy(client: &GrpcClient, model: &'static str) -> (Arc<AtomicBool>, JoinHandle<Result<u64>>) {
    let stop = Arc::new(AtomicBool::new(false));
    let (client, stopped) = (client.clone(), Arc::clone(&stop));
    let task = tokio::spawn(async move {
        let mut answers = 0;
        while !stopped.load(Ordering::Relaxed) {
            let left = i32::try_from(answers % 1000)?;
            let answer = wire::infer(&client, add_sub(model, left, 1)).await?;
            ensure!(output::<i32>(&answer, "OUTPUT0", &[1, 16])? == vec![left + 1; 16]);
            answers += 1;
        }
        Ok(answers)
    });
    (stop, task)
}

#[tokio::test]
async fn a_worker_that_is_killed_fails_its_own_run_and_nothing_else() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add(
        "victim",
        Model::new("slow").config(&format!("{ISOLATED} {ONE_AT_A_TIME}")),
    )?;
    repository.add("beside", Model::new("add_sub").config(ISOLATED))?;
    repository.add("inside", Model::new("add_sub"))?;
    // Each death is the first: none has a pause, and none leads to quarantine.
    let config = ConfigFile::new("[isolation]\ndeath_window = \"1ms\"\n")?;
    let mut server = TestServer::over(&repository)
        .arg(config.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    let others = [busy(&client, "beside"), busy(&client, "inside")];
    let ask = |iterations| {
        let client = client.clone();
        tokio::spawn(async move { wire::infer(&client, slow("victim", iterations)).await })
    };
    for (deaths, how) in [Signal::KILL, Signal::SEGV, Signal::ABORT, Signal::STOP]
        .into_iter()
        .enumerate()
    {
        ask(1).await??;
        let pid = worker_of(&client, "victim").await?;
        let pid = pid.context("the model runs in no worker")?;
        let doomed = ask(ENDLESS);
        // One more waits behind it, and must not be lost with it.
        eventually("the run is under way", || async {
            let overview = server.get("/v2/dormouse/overview?search=victim").await?;
            let victim = &overview.json()?["models"][0];
            Ok(victim["in_flight"] == 1 && victim["queued"] == 0)
        })
        .await?;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let patient = ask(2);
        eventually("one waits", || async {
            let waiting = server
                .metric("nv_inference_pending_request_count", &[r#"model="victim""#])
                .await?;
            Ok(waiting >= 1.0)
        })
        .await?;
        signal(pid, how)?;
        let status = doomed.await?.err().context("a killed run has answered")?;
        ensure!(status.code() == Code::Unavailable, "{how:?}: {status}");
        let said = format!("its worker process {pid} ");
        ensure!(status.message().contains(&said), "{how:?}: {status}");
        let answer = patient.await?.with_context(|| format!("{how:?}"))?;
        ensure!(!answer.outputs.is_empty());
        ensure!(is_ready(&server, "victim").await?);
        ensure!(is_gone(pid), "{how:?}: the worker is still there");
        let counted = server.metric("dormouse_worker_deaths_total", &[]).await?;
        ensure!(counted == (deaths + 1) as f64, "{how:?}: {counted} deaths");
        let restarts = server.metric("dormouse_worker_restarts_total", &[]).await?;
        ensure!(
            restarts == (deaths + 1) as f64,
            "{how:?}: {restarts} restarts"
        );
    }
    for cause in ["killed", "segv", "abort", "hung"] {
        let label = format!("cause=\"{cause}\"");
        let deaths = server
            .metric("dormouse_worker_deaths_total", &[&label])
            .await?;
        ensure!(
            deaths == 1.0,
            "{cause}: {deaths}\n{}",
            server.metrics_text().await?
        );
    }
    for (stop, task) in others {
        stop.store(true, Ordering::Relaxed);
        ensure!(task.await?? > 0);
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn a_worker_that_dies_is_replaced_and_readiness_tells_so_meanwhile() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("m", Model::new("add_sub"))?;
    let config = ConfigFile::new("[isolation]\ndefault = \"process\"\nmax_deaths = 0\n")?;
    let mut server = TestServer::over(&repository)
        .arg(config.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    wire::infer(&client, add_sub("m", 1, 1)).await?;
    let first = worker_of(&client, "m").await?.context("no worker")?;
    signal(first, Signal::KILL)?;
    // Nobody calls it, and still it comes back.
    eventually("another worker serves", || async {
        let now = worker_of(&client, "m").await?.filter(|&pid| pid != first);
        Ok(now.is_some() && is_ready(&server, "m").await?)
    })
    .await?;
    // From the second death in a row on there is a pause, in which the model is not ready and says
    // why. Each is longer than the last, for who was not looking.
    let killed = Cell::new(first);
    for (how, why) in [
        (Signal::KILL, "was killed (signal 9)"),
        (Signal::SEGV, "crashed (SIGSEGV)"),
    ] {
        eventually("it is not ready", || async {
            let (state, reason) = index_state(&client, "m", "1").await?;
            let says_why = state == "UNAVAILABLE" && reason.contains(why);
            if says_why && !is_ready(&server, "m").await? {
                return Ok(true);
            }
            let worker = worker_of(&client, "m").await?;
            if let Some(worker) = worker.filter(|&pid| pid != killed.get()) {
                killed.set(worker);
                signal(worker, how)?;
            }
            Ok(false)
        })
        .await?;
        eventually("it serves again", || async { is_ready(&server, "m").await }).await?;
    }
    wire::infer(&client, add_sub("m", 1, 1)).await?;
    server.assert_healthy().await
}

#[tokio::test]
async fn a_model_that_keeps_killing_its_worker_is_quarantined() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("bad", Model::new("add_sub"))?;
    repository.add("good", Model::new("add_sub"))?;
    let config = ConfigFile::new("[isolation]\ndefault = \"process\"\nmax_deaths = 2\n")?;
    let mut server = TestServer::over(&repository)
        .arg(config.flag())
        .arg("--model-control-mode=explicit")
        .arg("--load-model=*")
        .under(["env", "DORMOUSE_WORKER_FAULTS=bad=run:segv"])
        .start()
        .await?;
    let client = server.grpc().await?;
    for _ in 0..2 {
        let crashed = wire::infer(&client, add_sub("bad", 1, 1)).await;
        let status = crashed.err().context("a crash has answered")?;
        ensure!(status.code() == Code::Unavailable, "{status}");
        ensure!(status.message().contains("crashed (SIGSEGV)"), "{status}");
    }
    let refused = wire::infer(&client, add_sub("bad", 1, 1)).await;
    let status = refused.err().context("a quarantined model has answered")?;
    ensure!(status.code() == Code::Unavailable, "{status}");
    let (state, reason) = index_state(&client, "bad", "1").await?;
    for text in [status.message(), &reason] {
        ensure!(
            text.contains("is quarantined") && text.contains("2 times"),
            "{text}"
        );
    }
    ensure!(state == "UNAVAILABLE" && !is_ready(&server, "bad").await?);
    ensure!(server.metric("dormouse_models_quarantined", &[]).await? == 1.0);
    wire::infer(&client, add_sub("good", 1, 1)).await?;
    // Somebody who knows better.
    let loaded = server.post("/v2/repository/models/bad/load", b"").await?;
    ensure!(loaded.status == 200, "{}", loaded.text());
    ensure!(is_ready(&server, "bad").await?);
    ensure!(server.metric("dormouse_models_quarantined", &[]).await? == 0.0);
    ensure!(wire::infer(&client, add_sub("bad", 1, 1)).await.is_err());
    server.assert_healthy().await
}

#[tokio::test]
async fn a_run_that_never_ends_costs_its_worker_its_life() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("slow", Model::new("slow"))?;
    repository.add("stuck", Model::new("add_sub"))?;
    repository.add("good", Model::new("add_sub"))?;
    let config = ConfigFile::new("[isolation]\ndefault = \"process\"\nwatchdog = \"8s\"\n")?;
    let mut server = TestServer::over(&repository)
        .arg(config.flag())
        .under(["env", "DORMOUSE_WORKER_FAULTS=stuck=run:hang"])
        .start()
        .await?;
    let client = server.grpc().await?;
    wire::infer(&client, add_sub("good", 1, 1)).await?;
    let hung = [slow("slow", ENDLESS * 1000), add_sub("stuck", 1, 1)];
    for status in try_join_all(hung.map(|request| async {
        let answered = wire::infer(&client, request).await;
        answered.err().context("what never ends has ended")
    }))
    .await?
    {
        ensure!(status.code() == Code::Unavailable, "{status}");
        ensure!(
            status.message().contains("did not answer within 8s"),
            "{status}"
        );
    }
    wire::infer(&client, add_sub("good", 1, 1)).await?;
    server.assert_healthy().await
}

#[tokio::test]
async fn a_deadline_stops_a_run_in_a_worker_which_lives_on() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("slow", Model::new("slow").config(ONE_AT_A_TIME))?;
    let server = TestServer::over(&repository)
        .arg("--isolation=process")
        .start()
        .await?;
    let client = server.grpc().await?;
    wire::infer(&client, slow("slow", 1)).await?;
    let pid = worker_of(&client, "slow").await?;
    let request = with_timeout(slow("slow", ENDLESS), Duration::from_millis(200));
    let status = wire::infer(&client, request).await.err();
    let status = status.context("an endless run has ended")?;
    ensure!(status.code() == Code::DeadlineExceeded, "{status}");
    // Its one slot is free only once the run has stopped.
    wire::infer(&client, slow("slow", 1)).await?;
    ensure!(worker_of(&client, "slow").await? == pid && pid.is_some());
    Ok(())
}

#[tokio::test]
async fn a_model_that_crashes_its_trial_is_refused() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("bad", Model::new("add_sub"))?;
    repository.add("greedy", Model::new("add_sub_swapped"))?;
    repository.add("good", Model::new("slow"))?;
    let store = TestStore::new()?;
    settled().await;
    let start = || async {
        TestServer::over(&repository)
            .arg("--trial-load")
            .arg(store.flag())
            .under([
                "env",
                "DORMOUSE_WORKER_FAULTS=bad=open:abort,greedy=open:hog",
            ])
            .start()
            .await
    };
    let ask = async |client: &GrpcClient, model: &str| {
        let answer = wire::infer(client, add_sub(model, 1, 1)).await;
        answer
            .err()
            .with_context(|| format!("{model} has answered"))
    };
    let mut server = start().await?;
    let client = server.grpc().await?;
    let status = ask(&client, "bad").await?;
    ensure!(status.code() == Code::Unavailable, "{status}");
    ensure!(status.message().contains("aborted (SIGABRT)"), "{status}");
    // Memory that a trial may not have ends it, not the machine.
    let status = ask(&client, "greedy").await?;
    ensure!(
        status.message().contains("tried in a process of its own"),
        "{status}"
    );
    let (state, reason) = index_state(&client, "bad", "1").await?;
    ensure!(
        state == "UNAVAILABLE" && reason.contains("SIGABRT"),
        "{state} {reason}"
    );
    wire::infer(&client, slow("good", 1)).await?;
    ensure!(worker_of(&client, "good").await?.is_none());
    let trials = server.metric("dormouse_worker_deaths_total", &[]).await?;
    server.assert_healthy().await?;
    server.kill().await?;
    // The verdict is remembered: nothing crashes a second time.
    let server = start().await?;
    let client = server.grpc().await?;
    let status = ask(&client, "bad").await?;
    ensure!(status.message().contains("aborted (SIGABRT)"), "{status}");
    // Each of them in haste and in full.
    ensure!(trials == 4.0, "{trials}");
    ensure!(server.metric("dormouse_worker_deaths_total", &[]).await? == 0.0);
    Ok(())
}

/// The processes that a process has started and that have not ended.
fn children(parent: u32) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // One that ended meanwhile is nobody's child.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields = stat.rsplit_once(") ").map(|(_, rest)| rest);
        let mut fields = fields.unwrap_or_default().split(' ');
        let lives = fields.next().is_some_and(|state| state != "Z");
        let parent_of_it = fields.next().and_then(|parent| parent.parse().ok());
        if lives && parent_of_it == Some(parent) {
            found.push(pid);
        }
    }
    Ok(found)
}

#[tokio::test]
async fn a_trial_that_somebody_kills_is_no_verdict_on_its_model() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("m", Model::new("add_sub"))?;
    let store = TestStore::new()?;
    settled().await;
    let server = TestServer::over(&repository)
        .arg("--isolation=process")
        .arg(store.flag())
        .under(["env", "DORMOUSE_WORKER_FAULTS=m=open:hang"])
        .start()
        .await?;
    let client = server.grpc().await?;
    let asked = tokio::spawn({
        let client = client.clone();
        async move { wire::infer(&client, add_sub("m", 1, 1)).await }
    });
    let trial = AtomicU64::new(0);
    eventually("the trial is under way", || async {
        let found = children(server.pid())?.first().copied();
        trial.store(found.unwrap_or(0).into(), Ordering::Relaxed);
        Ok(found.is_some())
    })
    .await?;
    signal(u32::try_from(trial.load(Ordering::Relaxed))?, Signal::KILL)?;
    let status = asked.await?.err().context("it has answered")?;
    ensure!(status.message().contains("was killed"), "{status}");
    let deaths = server.metric("dormouse_worker_deaths_total", &[]).await?;
    ensure!(deaths == 1.0, "tried in another way: {deaths}");
    server.kill().await?;
    // The same files are tried again, and this time nobody interferes.
    let server = TestServer::over(&repository)
        .arg("--isolation=process")
        .arg(store.flag())
        .start()
        .await?;
    wire::infer(&server.grpc().await?, add_sub("m", 1, 1)).await?;
    Ok(())
}

#[tokio::test]
async fn workers_come_and_go_with_their_models_and_their_server() -> Result<()> {
    const MODEL: Generated = Generated::new(256, 8);
    let repository = TestRepository::new()?;
    let idle = parameters(&[("keep_alive", "1h"), ("park_after", "100ms")]);
    MODEL.add(&repository, "m", &idle)?;
    MODEL.weights(1).add(&repository, "other", "")?;
    let store = TestStore::new()?;
    settled().await;
    let server = TestServer::over(&repository)
        .arg("--isolation=process")
        .arg("--model-control-mode=explicit")
        .arg("--load-model=m")
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    MODEL.ask(&client, "m").await?;
    let first = worker_of(&client, "m").await?.context("no worker")?;
    eventually("it is prepared", || async {
        Ok(preparations(&server).await? == 1.0)
    })
    .await?;
    eventually("it is parked", || async {
        let (_, reason) = index_state(&client, "m", "1").await?;
        Ok(reason == format!("parked in worker {first}"))
    })
    .await?;
    ensure!(MODEL.ask(&client, "m").await?.as_deref() == Some("parked"));
    let unloaded = server.post("/v2/repository/models/m/unload", b"").await?;
    ensure!(unloaded.status == 200, "{}", unloaded.text());
    ensure!(
        is_gone(first),
        "the model is unloaded and its process there"
    );
    let loaded = server.post("/v2/repository/models/m/load", b"").await?;
    ensure!(loaded.status == 200, "{}", loaded.text());
    let second = worker_of(&client, "m").await?.context("no worker")?;
    // Many at once: batches are put together in shared memory.
    let asked = (0..32).map(|value| {
        let (client, value) = (client.clone(), value as f32);
        async move {
            let request = MODEL.request("m", value);
            MODEL.ask_for(&client, request, value).await
        }
    });
    try_join_all(asked).await?;
    eventually("the budget counts a process", || async {
        let held = server.metric("dormouse_models_memory_bytes", &[]).await?;
        Ok(held >= (48 << 20) as f64)
    })
    .await?;
    server.kill().await?;
    eventually("the worker dies with its server", || async {
        Ok(is_gone(second))
    })
    .await
}

#[tokio::test]
async fn every_type_and_size_of_tensor_crosses_to_a_worker_and_back() -> Result<()> {
    let repository = TestRepository::new()?;
    let types = [
        ("bool", 1),
        ("uint8", 1),
        ("int8", 1),
        ("uint16", 2),
        ("int16", 2),
        ("fp16", 2),
        ("bf16", 2),
        ("uint32", 4),
        ("int32", 4),
        ("fp32", 4),
        ("uint64", 8),
        ("int64", 8),
        ("fp64", 8),
        ("bytes", 0),
    ];
    for (name, _) in types {
        repository.add(
            name,
            Model::new(&format!("identity_{name}")).config(ISOLATED),
        )?;
    }
    let server = TestServer::over(&repository)
        .arg("--trial-load=false")
        .arg("--background-preparation=false")
        .start()
        .await?;
    let client = server.grpc().await?;
    let metadata = |model: &str| {
        let (mut client, name) = (client.clone(), model.to_owned());
        async move {
            let request = dormouse_proto::inference::ModelMetadataRequest {
                name,
                version: String::new(),
            };
            anyhow::Ok(client.model_metadata(request).await?.into_inner())
        }
    };
    for (name, width) in types {
        let described = metadata(name).await?;
        let (input, to) = (&described.inputs[0], &described.outputs[0]);
        // Larger than what a first run has room for, then small again, then nothing.
        for elements in [300_000_usize, 16, 0] {
            let data: Vec<u8> = match width {
                0 => (0..elements)
                    .flat_map(|n| [&[(n % 5) as u8, 0, 0, 0][..], &b"abcde"[..n % 5]].concat())
                    .collect(),
                width => (0..elements * width)
                    .map(|n| ((n / width) % 2) as u8)
                    .collect(),
            };
            let shape = [1, elements as i64];
            let request = Request::new(name).raw_input(
                &input.name,
                &input.datatype,
                &shape,
                data.clone().into(),
            );
            let answer = match wire::infer(&client, request).await {
                Ok(answer) => answer,
                // Its shape is fixed.
                Err(status) if status.code() == Code::InvalidArgument => continue,
                Err(status) => return Err(status).context(format!("{name} {elements}")),
            };
            ensure!(answer.outputs[0].name == to.name && answer.outputs[0].shape == shape);
            ensure!(answer.raw_output_contents[0] == data, "{name} {elements}");
        }
    }
    Ok(())
}
