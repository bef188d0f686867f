//! Models wake from the prepared store, are parked on their way to sleep, and answer the same at
//! every stage.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_model_store::store::{PackingVerdict, Store, StoreConfig};
use futures_util::future::{try_join, try_join_all};

use crate::deadlines::ENDLESS;
use crate::generated::{Generated, TestStore, parameters, preparations, settled};
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, dormouse, eventually};
use crate::wire::{self, GrpcClient, Request, slow};

/// Large enough for weights of its own pages, small enough to load at once: 4 MiB.
pub(crate) const SMALL: Generated = Generated::new(512, 4);

pub(crate) fn briefly() -> String {
    parameters(&[("keep_alive", "30ms")])
}

/// Leaves the model alone and asks again until it was woken from `kind`.
pub(crate) async fn wakes_from(
    client: &GrpcClient,
    name: &str,
    model: Generated,
    kind: &str,
) -> Result<()> {
    let mut rest = Duration::from_millis(50);
    eventually(&format!("{name} wakes from: {kind}"), || {
        rest = rest * 3 / 2;
        async move {
            tokio::time::sleep(rest).await;
            Ok(model.ask(client, name).await?.as_deref() == Some(kind))
        }
    })
    .await
}

#[tokio::test]
async fn a_model_is_prepared_after_its_first_load_and_wakes_from_the_store() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let outside = SMALL.weights(1).outside();
    SMALL.add(&repository, "inside", &briefly())?;
    outside.add(&repository, "outside", &briefly())?;
    settled().await;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    for (name, model) in [("inside", SMALL), ("outside", outside)] {
        let first = model.ask(&client, name).await?;
        ensure!(first.as_deref() == Some("source"), "{first:?}");
    }
    eventually("both are prepared", || async {
        Ok(preparations(&server).await? == 2.0)
    })
    .await?;
    for (name, model) in [("inside", SMALL), ("outside", outside)] {
        wakes_from(&client, name, model, "prepared").await?;
        wakes_from(&client, name, model, "prepared").await?;
        let statistics = wire::statistics(&client, name).await?;
        let cold = statistics.cold_starts.last().context("no cold start")?;
        ensure!(cold.kind == "prepared", "{cold:?}");
        let stages: Vec<&str> = cold.stages.iter().map(|stage| &*stage.name).collect();
        ensure!(stages.contains(&"look-up"), "{stages:?}");
        ensure!(!stages.contains(&"read"), "{stages:?}");
    }
    ensure!(preparations(&server).await? == 2.0, "prepared again");
    let (good, _) = store.command("verify").await?;
    ensure!(good, "the store is damaged");
    server.assert_healthy().await
}

#[tokio::test]
async fn what_cannot_be_loaded_in_haste_is_loaded_in_full() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("decided", Model::new("decided"))?;
    settled().await;
    let ways = ["--trial-load=false", "--trial-load", "--isolation=process"];
    let each = ways.map(|flag| {
        let repository = &repository;
        async move {
            let store = TestStore::new()?;
            let mut server = TestServer::over(repository)
                .arg(flag)
                .arg(store.flag())
                .start()
                .await?;
            let values = [-1.0f32, 0.0, 1.0, 2.0];
            let request = Request::new("decided").input("INPUT", &[1, 4], &values);
            let response = wire::infer(&server.grpc().await?, request).await?;
            let answer = wire::output::<f32>(&response, "OUTPUT", &[1, 4])?;
            ensure!(answer == [0.0, 0.0, 1.0, 2.0], "{flag}: {answer:?}");
            eventually("it is prepared", || async {
                Ok(preparations(&server).await? == 1.0)
            })
            .await?;
            server.assert_healthy().await
        }
    });
    try_join_all(each).await.map(drop)
}

#[tokio::test]
async fn a_second_process_wakes_models_that_the_first_has_prepared() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    SMALL.add(&repository, "model", &briefly())?;
    settled().await;
    let start = || TestServer::over(&repository).arg(store.flag()).start();
    let first = start().await?;
    SMALL.ask(&first.grpc().await?, "model").await?;
    eventually("it is prepared", || async {
        Ok(preparations(&first).await? == 1.0)
    })
    .await?;
    // One beside it, one after it.
    for first in [Some(first), None] {
        let mut second = start().await?;
        let client = second.grpc().await?;
        let kind = SMALL.ask(&client, "model").await?;
        ensure!(kind.as_deref() == Some("prepared"), "{kind:?}");
        ensure!(preparations(&second).await? == 0.0, "prepared twice");
        second.assert_healthy().await?;
        drop(first);
    }
    Ok(())
}

#[tokio::test]
async fn prepare_puts_models_into_the_store_before_anybody_calls() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    SMALL.add(&repository, "model", &briefly())?;
    repository.add("tiny", Model::new("add_sub"))?;
    crate::server::engine_installed().await?;
    // Right after they were copied: it waits until they will be known again.
    SMALL.add(&repository, "model", &briefly())?;
    // In a moment, for a program that is slow to start.
    let graph = repository.model_dir("model").join("1/model.onnx");
    let soon = std::time::SystemTime::now() + Duration::from_millis(1900);
    std::fs::File::options()
        .write(true)
        .open(graph)?
        .set_modified(soon)?;
    let mut prepare = tokio::process::Command::from(dormouse());
    prepare.args(["prepare", "--format=json", "--model-repository"]);
    prepare.arg(repository.path()).arg(store.flag());
    for expected in ["prepared", "was there"] {
        let output = prepare.output().await?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{errors}");
        let rows: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let rows = rows.as_array().context("not a list")?;
        ensure!(rows.len() == 2, "{rows:?}");
        ensure!(rows.iter().all(|row| row["result"] == expected), "{rows:?}");
        ensure!(rows[0]["model"] == "model" && rows[0]["version"] == "1");
        ensure!(rows.iter().all(|row| row["with_run"] == true), "{rows:?}");
        let waited = errors.contains("count as settled");
        ensure!(waited == (expected == "prepared"), "{errors}");
    }
    let server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    let kind = SMALL.ask(&client, "model").await?;
    ensure!(kind.as_deref() == Some("prepared"), "{kind:?}");
    ensure!(preparations(&server).await? == 0.0);
    Ok(())
}

#[tokio::test]
async fn an_idle_model_is_parked_answers_from_there_and_is_closed() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let kept = parameters(&[("keep_alive", "1h"), ("park_after", "20ms")]);
    let brief = parameters(&[("keep_alive", "2s"), ("park_after", "20ms")]);
    let other = SMALL.weights(1);
    SMALL.add(&repository, "kept", &kept)?;
    other.add(&repository, "brief", &brief)?;
    settled().await;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    let count = async |metric: &str, model: &str| {
        let label = format!(r#"model="{model}""#);
        server.metric(metric, &[&label]).await
    };
    SMALL.ask(&client, "kept").await?;
    let mut parks = 0.0;
    for _ in 0..5 {
        eventually("the model is parked", || async {
            Ok(count("dormouse_parks_total", "kept").await? > parks)
        })
        .await?;
        parks = count("dormouse_parks_total", "kept").await?;
        SMALL.ask(&client, "kept").await?;
    }
    ensure!(
        count("dormouse_loads_total", "kept").await? == 1.0,
        "parked models are not loaded again"
    );
    other.ask(&client, "brief").await?;
    for sleeps in 1..3 {
        eventually("the model sleeps", || async {
            Ok(count("dormouse_sleeps_total", "brief").await? >= f64::from(sleeps))
        })
        .await?;
        other.ask(&client, "brief").await?;
    }
    eventually("it was parked on its way", || async {
        Ok(count("dormouse_parks_total", "brief").await? >= 1.0)
    })
    .await?;
    server.assert_healthy().await
}

fn says(message: &'static str) -> impl Fn(&[serde_json::Value]) -> Option<()> {
    move |records| {
        let mut messages = records
            .iter()
            .filter_map(|record| record["message"].as_str());
        messages.any(|said| said.starts_with(message)).then_some(())
    }
}

/// Makes the store say that packing pays for everything in it.
async fn packing_pays(store: &TestStore) -> Result<()> {
    let dir = store.path().to_owned();
    tokio::task::spawn_blocking(move || {
        let store = Store::open(StoreConfig {
            dir,
            max_bytes: StoreConfig::DEFAULT_MAX_BYTES,
        })?;
        for entry in store.list()? {
            store.update_facts(&entry.key, |facts| {
                facts.packing = Some(PackingVerdict {
                    unpacked_run_us: 1_000_000,
                    packed_run_us: 1,
                    packed_private_bytes: 0,
                    pays: true,
                });
            })?;
        }
        anyhow::Ok(())
    })
    .await?
}

#[tokio::test]
async fn a_packed_session_takes_over_under_traffic_without_a_failed_request() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let config = parameters(&[("keep_alive", "200ms"), ("park_after", "50ms")]);
    SMALL.add(&repository, "model", &config)?;
    settled().await;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    SMALL.ask(&client, "model").await?;
    eventually("it is prepared", || async {
        Ok(preparations(&server).await? == 1.0)
    })
    .await?;
    // The verdict is noted after the preparation was counted, if there is one.
    let prepared = says("prepared: wakes from the store");
    server.log.wait_for(prepared).await?;
    packing_pays(&store).await?;
    for times in 1..3 {
        eventually("it sleeps", || async {
            Ok(server.metric("dormouse_sleeps_total", &[]).await? >= f64::from(times))
        })
        .await?;
        let packed = |times: i32| {
            let server = &server;
            async move {
                let packed = server.metric("dormouse_packed_sessions_total", &[]);
                Ok(packed.await? >= f64::from(times))
            }
        };
        eventually("a packed session takes over", || async {
            try_join_all((0..8).map(|_| SMALL.ask(&client, "model"))).await?;
            packed(times).await
        })
        .await?;
        try_join_all((0..32).map(|_| SMALL.ask(&client, "model"))).await?;
    }
    ensure!(
        server.metric("nv_inference_request_failure", &[]).await? == 0.0,
        "requests failed"
    );
    server.assert_healthy().await
}

/// Asks for a model that never sleeps until the server says that another session has taken over.
async fn serves_until_it_says(flag: &str, message: &'static str) -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let stays = parameters(&[("keep_alive", "forever"), ("park_after", "never")]);
    SMALL.add(&repository, "model", &stays)?;
    settled().await;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg(flag)
        .start()
        .await?;
    let client = server.grpc().await?;
    let first = SMALL.ask(&client, "model").await?;
    ensure!(first.as_deref() == Some("source"), "{first:?}");
    let said = says(message);
    // No call is given up: that would count as a failure.
    eventually(message, || async {
        try_join_all((0..8).map(|_| SMALL.ask(&client, "model"))).await?;
        Ok(said(&server.log.records()).is_some())
    })
    .await?;
    try_join_all((0..8).map(|_| SMALL.ask(&client, "model"))).await?;
    for (metric, expected) in [
        ("nv_inference_request_failure", 0.0),
        ("dormouse_loads_total", 1.0),
        ("dormouse_sleeps_total", 0.0),
    ] {
        let found = server.metric(metric, &[]).await?;
        ensure!(found == expected, "{metric} {found}");
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn a_model_goes_on_over_the_store_once_it_is_prepared() -> Result<()> {
    serves_until_it_says(
        "--store-max-size=1GiB",
        "weights are read from the prepared store",
    )
    .await
}

#[tokio::test]
async fn a_model_that_cannot_be_prepared_gets_a_session_in_full_from_its_files() -> Result<()> {
    serves_until_it_says(
        "--store-max-size=1MiB",
        "a session with all optimisations is in use",
    )
    .await
}

#[tokio::test]
async fn an_instance_group_is_run_by_one_session_side_by_side() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let config = "instance_group [ { kind: KIND_CPU count: 4 } ]";
    repository.add("slow", Model::new("slow").config(config))?;
    for (flag, sessions) in [("--sharing=true", 1), ("--sharing=false", 4)] {
        let mut server = TestServer::over(&repository)
            .arg(store.flag())
            .arg(flag)
            .start()
            .await?;
        let client = server.grpc().await?;
        wire::infer(&client, slow("slow", 1)).await?;
        let endless = |_| {
            let client = client.clone();
            tokio::spawn(async move { wire::infer(&client, slow("slow", ENDLESS)).await })
        };
        let endless: Vec<_> = (0..3).map(endless).collect();
        // With fewer than four runs at a time these would wait for ever.
        for _ in 0..20 {
            let answer = crate::server::patiently(
                "a fourth run beside three",
                wire::infer(&client, slow("slow", 1)),
            );
            answer.await??;
        }
        ensure!(endless.iter().all(|run| !run.is_finished()));
        for run in endless {
            run.abort();
        }
        let statistics = wire::statistics(&client, "slow").await?;
        let [cold] = &statistics.cold_starts[..] else {
            anyhow::bail!("{} loads", statistics.cold_starts.len());
        };
        let built = cold.stages.iter().filter(|stage| stage.name == "session");
        ensure!(built.count() == sessions, "{flag}: {cold:?}");
        let at_once = server.metric("dormouse_runs_at_once", &[]).await?;
        ensure!(at_once == 4.0, "{at_once} runs at once instead of 4");
        server.assert_healthy().await?;
    }
    Ok(())
}

#[tokio::test]
async fn versions_with_equal_weights_share_what_is_stored_of_them() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    let config = format!("{}\nversion_policy: {{ all {{ }} }}", briefly());
    let versions = [SMALL, SMALL.bias(1), SMALL.bias(2)];
    for (version, model) in (1..).zip(versions) {
        model.write(&repository.model_dir("model").join(version.to_string()))?;
    }
    repository.write_config("model", &config)?;
    settled().await;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let client = server.grpc().await?;
    for round in 1..3 {
        for (version, model) in (1..).zip(versions) {
            let request = model.request("model", 1.0).version(&version.to_string());
            model.ask_for(&client, request, 1.0).await?;
        }
        if round == 1 {
            eventually("all are prepared", || async {
                Ok(preparations(&server).await? == 3.0)
            })
            .await?;
        }
    }
    let (_, list) = store.command("ls").await?;
    let entries = list["entries"].as_array().context("no entries")?;
    ensure!(entries.len() == 3, "{list}");
    let weights = (SMALL.size * SMALL.size * 4 * SMALL.layers) as u64;
    for entry in entries {
        let shared = entry["shared_bytes"].as_u64().context("no number")?;
        ensure!(shared >= weights, "{list}");
    }
    let mut stored = 0;
    for file in store.files("packs")? {
        stored += file.metadata()?.len();
    }
    ensure!(stored < weights + weights / 8, "{stored} bytes of packs");
    server.assert_healthy().await
}

#[tokio::test]
async fn a_model_serves_right_with_each_mechanism_switched_off() -> Result<()> {
    let repository = TestRepository::new()?;
    let config = parameters(&[("keep_alive", "150ms"), ("park_after", "20ms")]);
    let config = format!("{config}\ninstance_group [ {{ kind: KIND_CPU count: 2 }} ]");
    SMALL.add(&repository, "model", &config)?;
    settled().await;
    let flags = [
        "--prepared-store=false",
        "--background-preparation=false",
        "--overlap=false",
        "--sharing=false",
        "--staged-exit=false",
    ];
    let each = flags.map(|flag| {
        let repository = &repository;
        async move {
            let store = TestStore::new()?;
            let server = TestServer::over(repository)
                .arg(store.flag())
                .arg(flag)
                .start()
                .await?;
            let client = server.grpc().await?;
            let prepares = matches!(flag, "--overlap=false" | "--staged-exit=false");
            let first = SMALL.ask(&client, "model").await?;
            ensure!(first.as_deref() == Some("source"), "{flag}: {first:?}");
            if prepares {
                wakes_from(&client, "model", SMALL, "prepared").await?;
            }
            for sleeps in 1..4 {
                eventually("it sleeps", || async {
                    let slept = server.metric("dormouse_sleeps_total", &[]).await?;
                    Ok(slept >= f64::from(sleeps))
                })
                .await?;
                try_join_all((0..4).map(|_| SMALL.ask(&client, "model"))).await?;
            }
            // It counts once packing was compared, which is after the first wake from the store.
            let expected = f64::from(u8::from(prepares));
            eventually("its preparation is counted", || async {
                Ok(preparations(&server).await? == expected)
            })
            .await?;
            let parks = async || server.metric("dormouse_parks_total", &[]).await;
            match flag {
                "--overlap=false" => {
                    eventually("it is parked", || async {
                        SMALL.ask(&client, "model").await?;
                        tokio::time::sleep(Duration::from_millis(60)).await;
                        Ok(parks().await? > 0.0)
                    })
                    .await?;
                    let statistics = wire::statistics(&client, "model").await?;
                    let mut starts = statistics.cold_starts.iter();
                    ensure!(starts.any(|cold| cold.kind == "prepared"), "{statistics:?}");
                }
                _ => ensure!(parks().await? == 0.0, "{flag}: parked"),
            }
            let mut server = server;
            server.assert_healthy().await
        }
    });
    try_join_all(each).await.map(drop)
}

#[tokio::test]
async fn keep_alive_may_be_off_forever_or_learnt() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    for kind in ["off", "forever", "adaptive"] {
        SMALL.add(&repository, kind, &parameters(&[("keep_alive", kind)]))?;
    }
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .arg("--keep-alive=10ms")
        .start()
        .await?;
    let client = server.grpc().await?;
    let count = async |metric: &str, model: &str| {
        let label = format!(r#"model="{model}""#);
        server.metric(metric, &[&label]).await
    };
    for calls in 1..6 {
        for kind in ["off", "forever", "adaptive"] {
            SMALL.ask(&client, kind).await?;
        }
        eventually("the model that is never kept sleeps", || async {
            Ok(count("dormouse_sleeps_total", "off").await? == f64::from(calls))
        })
        .await?;
    }
    ensure!(count("dormouse_loads_total", "off").await? == 5.0);
    // Nobody knows yet when it is called: it is kept longer than a few calls take.
    for kept in ["forever", "adaptive"] {
        ensure!(count("dormouse_sleeps_total", kept).await? == 0.0, "{kept}");
        ensure!(count("dormouse_loads_total", kept).await? == 1.0, "{kept}");
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn two_processes_prepare_one_model_at_the_same_time() -> Result<()> {
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    SMALL.add(&repository, "model", &briefly())?;
    settled().await;
    let start = || TestServer::over(&repository).arg(store.flag()).start();
    let (one, two) = try_join(start(), start()).await?;
    let clients = [one.grpc().await?, two.grpc().await?];
    try_join(
        SMALL.ask(&clients[0], "model"),
        SMALL.ask(&clients[1], "model"),
    )
    .await?;
    for client in &clients {
        wakes_from(client, "model", SMALL, "prepared").await?;
    }
    let (good, report) = store.command("verify").await?;
    ensure!(good, "{report}");
    eventually("nothing is left of who was second", || async {
        Ok(store.files("drafts")?.is_empty())
    })
    .await?;
    for mut server in [one, two] {
        server.assert_healthy().await?;
    }
    Ok(())
}
