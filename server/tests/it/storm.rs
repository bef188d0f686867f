//! A thousand requests at once for a model that sleeps.

use anyhow::{Result, ensure};
use futures_util::future::try_join_all;

use crate::generated::{Generated, TestStore, parameters, preparations, settled};
use crate::repository::TestRepository;
use crate::server::{TestServer, eventually};
use crate::wire;

const REQUESTS: usize = 1000;
const CONNECTIONS: usize = 8;

#[tokio::test]
async fn a_storm_on_a_sleeping_model_is_answered_by_one_load() -> Result<()> {
    let model = Generated::new(256, 16);
    let repository = TestRepository::new()?;
    let store = TestStore::new()?;
    // Longer than a busy machine takes to send a storm.
    model.add(&repository, "model", &parameters(&[("keep_alive", "10s")]))?;
    settled().await;
    let mut server = TestServer::over(&repository)
        .arg(store.flag())
        .start()
        .await?;
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        clients.push(server.grpc().await?);
    }
    for (storms, from) in [(1, "source"), (2, "prepared")] {
        let calls = (0..REQUESTS).map(|index| {
            let client = clients[index % CONNECTIONS].clone();
            let value = (index % 32) as f32;
            async move {
                let request = model.request("model", value);
                model.ask_for(&client, request, value).await
            }
        });
        let kinds = try_join_all(calls).await?;
        let kinds: Vec<String> = kinds.into_iter().flatten().collect();
        ensure!(kinds.iter().all(|kind| kind == from), "{from}: {kinds:?}");
        ensure!(!kinds.is_empty(), "nobody waited");
        let loads = server.metric("dormouse_loads_total", &[]).await?;
        ensure!(loads == f64::from(storms), "{loads} loads");
        let statistics = wire::statistics(&clients[0], "model").await?;
        let answered = (REQUESTS * storms as usize) as u64;
        ensure!(statistics.inference_count == answered, "{statistics:?}");
        eventually("it is prepared and sleeps", || async {
            let slept = server.metric("dormouse_sleeps_total", &[]).await?;
            Ok(preparations(&server).await? == 1.0 && slept >= f64::from(storms))
        })
        .await?;
    }
    server.assert_healthy().await
}
