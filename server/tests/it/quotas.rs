//! What a client may have under way and ask for in a minute, from outside.

use anyhow::{Context, Result, ensure};
use dormouse_client::{Client, Code, RetryPolicy};

use crate::authority::Files;
use crate::deadlines::{ENDLESS, ONE_AT_A_TIME};
use crate::http;
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, eventually};
use crate::wire::{self, add_sub};

#[tokio::test]
async fn a_client_over_its_quota_is_told_when_to_come_again() -> Result<()> {
    let files = Files::new()?;
    let text = "[quotas]\nconcurrency = 1\nbytes_in_flight = \"1KiB\"\nloads_per_minute = 1\n";
    files.put("server.toml", text)?;
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg(files.flag("config", "server.toml"))
        .arg("--model-control-mode=explicit")
        .start()
        .await?;
    let load = "/v2/repository/models/simple/load";
    let loaded = server.post(load, b"{}").await?;
    ensure!(loaded.status == 200, "{}", loaded.text());
    let refused = server.post(load, b"{}").await?;
    ensure!(refused.status == 429, "{}", refused.text());
    let wait: u64 = refused.header("retry-after").context("no hint")?.parse()?;
    ensure!((1..=60).contains(&wait), "{wait}");

    let client = server.grpc().await?;
    wire::infer(&client, add_sub("simple", 1, 2)).await?;
    let large = wire::Request::new("simple").input("INPUT0", &[64, 16], &[0i32; 1024]);
    let refused = wire::infer(&client, large)
        .await
        .err()
        .context("was served")?;
    ensure!(refused.code() == Code::ResourceExhausted, "{refused:?}");
    ensure!(refused.metadata().contains_key("grpc-retry-pushback-ms"));
    let large = server
        .post("/v2/models/simple/infer", &[b' '; 2048])
        .await?;
    ensure!(large.status == 429, "{}", large.text());
    wire::infer(&client, add_sub("simple", 1, 2)).await?;
    for (quota, count) in [("loads_per_minute", 1.0), ("bytes_in_flight", 2.0)] {
        let label = format!("quota=\"{quota}\"");
        let labels = [label.as_str(), "client=\"address\""];
        let counted = server
            .metric("dormouse_quota_refusals_total", &labels)
            .await?;
        ensure!(counted == count, "{quota}: {counted}");
    }
    // Probes and metrics are never turned away.
    ensure!(server.get("/v2/health/ready").await?.status == 200);
    Ok(())
}

#[tokio::test]
async fn a_client_with_all_its_requests_under_way_waits_and_others_do_not() -> Result<()> {
    let files = Files::new()?;
    let few = "[\"inference\", \"metrics\"]\nquota = { concurrency = 1 }\n";
    let entry = |name: &str| {
        format!("[[token]]\nname = \"{name}\"\ntoken = \"{name}-0123456789\"\nscopes = {few}")
    };
    files.put(
        "tokens.toml",
        &format!("{}{}", entry("team-a"), entry("team-b")),
    )?;
    let repository = TestRepository::new()?;
    repository.add("slow", Model::new("slow").config(ONE_AT_A_TIME))?;
    let mut server = TestServer::over(&repository)
        .arg(files.flag("auth-tokens", "tokens.toml"))
        .start()
        .await?;
    let (mine, others) = ("team-a-0123456789", "team-b-0123456789");
    let client = |token: &str| {
        Client::builder(server.grpc.to_string())
            .token(token)
            .retry(RetryPolicy::NEVER)
            .connect_lazy()
    };
    let run = |iterations: i64| {
        let tensor = dormouse_client::Tensor::from_slice([1], &[iterations])?;
        anyhow::Ok(dormouse_client::InferRequest::new("slow").input("ITERATIONS", tensor))
    };
    client(mine)?.infer(run(1)?).await?;
    let (busy, endless) = (client(mine)?, run(ENDLESS)?);
    let busy = tokio::spawn(async move { busy.infer(endless).await.is_ok() });
    eventually("the request is under way", || async {
        let name = "dormouse_request_bytes_in_flight";
        Ok(server.metric_as(mine, name, &[]).await? > 0.0)
    })
    .await?;
    let refused = http::call_as(server.http, "GET", "/v2/models/slow", mine, b"").await?;
    ensure!(refused.status == 429, "{}", refused.text());
    ensure!(
        refused.error()?.contains("1 requests under way"),
        "{}",
        refused.text()
    );
    let wait: u64 = refused.header("retry-after").context("no hint")?.parse()?;
    ensure!(wait >= 1, "{wait}");
    let refused = client(mine)?.infer(run(1)?).await.err();
    let refused = refused.and_then(|error| error.code());
    ensure!(refused == Some(Code::ResourceExhausted), "{refused:?}");
    // Who has a quota of their own is not concerned, and neither are probes and metrics.
    let other = http::call_as(server.http, "GET", "/v2/models/slow", others, b"").await?;
    ensure!(other.status == 200, "{}", other.text());
    ensure!(server.get("/v2/health/ready").await?.status == 200);
    let labels = [r#"quota="concurrency""#, r#"client="team-a""#];
    let refusals = server
        .metric_as(others, "dormouse_quota_refusals_total", &labels)
        .await?;
    ensure!(refusals == 2.0, "{refusals} refusals");
    busy.abort();
    eventually("what was given up counts no more", || async {
        let answer = http::call_as(server.http, "GET", "/v2/models/slow", mine, b"").await?;
        Ok(answer.status == 200)
    })
    .await?;
    server.assert_healthy().await
}
