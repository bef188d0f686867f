//! The process itself sleeps: it ends when nobody calls, and a connection starts it again.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::deadlines::{ONE_AT_A_TIME, occupy};
use crate::foreign::script;
use crate::python::succeed;
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, dormouse, engine_installed, eventually};
use crate::wire::{self, slow};

/// Longer than a busy machine takes from the server's start to a test's first request.
const LONG_ENOUGH: Duration = Duration::from_secs(8);

#[tokio::test]
async fn an_idle_server_ends_and_probes_do_not_keep_it() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let mut server = TestServer::over(&repository)
        .arg("--exit-when-idle=300ms")
        .spawn()
        .await?;
    eventually("the server ends under probes and scrapes", || async {
        let probed = server.get("/v2/health/ready").await.is_ok();
        let scraped = server.metrics_text().await.is_ok();
        Ok(!probed && !scraped)
    })
    .await?;
    let status = server.exited().await?;
    ensure!(status.success(), "{status}\n{}", server.log.tail());
    Ok(())
}

#[tokio::test]
async fn a_server_with_a_request_is_not_idle() -> Result<()> {
    let repository = TestRepository::new()?;
    repository.add("slow", Model::new("slow").config(ONE_AT_A_TIME))?;
    let mut server = TestServer::over(&repository)
        .arg(format!("--exit-when-idle={}s", LONG_ENOUGH.as_secs()))
        .spawn()
        .await?;
    let client = server.grpc().await?;
    wire::infer(&client, slow("slow", 1)).await?;
    let endless = occupy(&server, &client).await?;
    tokio::time::sleep(LONG_ENOUGH + Duration::from_millis(500)).await;
    server.assert_healthy().await?;
    endless.run.abort();
    let status = server.exited().await?;
    ensure!(status.success(), "{status}\n{}", server.log.tail());
    Ok(())
}

/// Sockets stay with who opened them; no connection is refused or lost over many lives.
#[tokio::test]
async fn a_connection_starts_the_process_and_none_is_lost() -> Result<()> {
    const ROUNDS: &str = "20";
    engine_installed().await?;
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = dormouse();
    let mut activator = Command::new("python3");
    for (name, value) in server.get_envs() {
        activator.env(name, value.context("a variable that is set")?);
    }
    activator
        .arg(script("activation.py"))
        .args([ROUNDS, "0.1"])
        .arg(server.get_program())
        .arg("serve")
        .arg("--model-repository")
        .arg(repository.path())
        // Would be in use by others: what was handed over must win.
        .args(["--http-port=1", "--grpc-port=1", "--metrics-port=0"])
        .args(["--exit-when-idle=100ms", "--log-info=false"]);
    let rounds = move || succeed(&mut activator, "a connection was not served");
    let output = tokio::task::spawn_blocking(rounds).await??;
    eprint!("{}", String::from_utf8_lossy(&output.stdout));
    Ok(())
}

/// Starts a server that gets one socket under a name, and gives back what it says before it ends.
fn start_with_name(name: &str, flags: &str) -> Result<String> {
    let repository = TestRepository::new()?;
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let server = dormouse();
    let mut shell = Command::new("sh");
    for (name, value) in server.get_envs() {
        shell.env(name, value.context("a variable that is set")?);
    }
    // The listener becomes the child's standard input, and there descriptor 3.
    let output = shell
        .args(["-c", r#"export LISTEN_PID=$$; exec "$@" 3<&0"#, "sh"])
        .arg(server.get_program())
        .arg("serve")
        .arg("--model-repository")
        .arg(repository.path())
        .args(flags.split_whitespace())
        .env("LISTEN_FDS", "1")
        .env("LISTEN_FDNAMES", name)
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(listener)))
        .output()?;
    ensure!(!output.status.success(), "it started with {name}");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[tokio::test]
async fn sockets_for_nothing_are_refused() -> Result<()> {
    engine_installed().await?;
    let said = start_with_name("web", "")?;
    ensure!(said.contains("named 'web'"), "{said}");
    ensure!(said.contains("expected http, grpc or metrics"), "{said}");
    let said = start_with_name("http", "--allow-http=false")?;
    ensure!(said.contains("switched off (--allow-http)"), "{said}");
    Ok(())
}
