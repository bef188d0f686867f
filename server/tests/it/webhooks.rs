//! Others are told what happens: signed messages to a receiver that checks them.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::foreign::script;
use crate::python::succeed;
use crate::repository::{Model, TestRepository};
use crate::server::TestServer;
use crate::wire::{self, add_sub, slow};

const SECRET: &str = "correct horse battery staple";

/// The receiver's process; killed when dropped.
struct Receiver {
    child: Child,
    lines: BufReader<ChildStdout>,
    port: u16,
}

impl Receiver {
    fn start(awaited: &[&str], tls: &[&Path]) -> Result<Self> {
        let mut child = Command::new("python3")
            .arg(script("webhook_receiver.py"))
            .args([SECRET, &awaited.join(",")])
            .args(tls)
            .stdout(Stdio::piped())
            .spawn()
            .context("a Python 3 is needed to receive webhooks")?;
        let stdout = child.stdout.take().context("a pipe")?;
        let mut lines = BufReader::new(stdout);
        let mut line = String::new();
        lines.read_line(&mut line)?;
        let port = line.trim().strip_prefix("port ").context("a port")?;
        let port = port.parse()?;
        Ok(Self { child, lines, port })
    }

    /// Everything it received, once it has what it waits for.
    fn finish(mut self) -> Result<Vec<String>> {
        let lines = (&mut self.lines).lines();
        let lines = lines.collect::<Result<Vec<_>, _>>()?;
        ensure!(self.child.wait()?.success(), "the receiver: {lines:?}");
        Ok(lines)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // Already gone when all went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Readable, but its load fails: the warm-up's file is not there.
const NO_WARMUP_FILE: &str = r#"model_warmup [ {
    name: "absent" batch_size: 1
    inputs { key: "ITERATIONS"
             value { data_type: TYPE_INT64 dims: [ 1 ] input_data_file: "absent" } }
} ]"#;

/// Runs a server with one hook through waking, failing, sleeping and idling to its end.
async fn live_and_tell(receiver: Receiver, url: &str, further: &str) -> Result<Vec<String>> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    repository.add("failing", Model::new("slow").config(NO_WARMUP_FILE))?;
    let folder = tempfile::tempdir()?;
    let secret = folder.path().join("secret");
    std::fs::write(&secret, format!("{SECRET}\n"))?;
    let config = folder.path().join("server.toml");
    let text = format!(
        r#"id = "mouse-7"
        [lifecycle]
        keep_alive = "100ms"
        idle_after = "200ms"
        [[webhooks]]
        url = "{url}"
        secret_file = "{}"
        retry_delay = "10ms"
        retries = 6
        {further}
        "#,
        secret.display()
    );
    std::fs::write(&config, text)?;
    let mut server = TestServer::over(&repository)
        .arg(format!("--config={}", config.display()))
        .arg("--strict-readiness=false")
        .start()
        .await?;
    let client = server.grpc().await?;
    wire::infer(&client, add_sub("simple", 1, 1)).await?;
    let failed = wire::infer(&client, slow("failing", 1)).await;
    ensure!(failed.is_err(), "a model without its warm-up answered");
    let lines = tokio::task::spawn_blocking(move || receiver.finish()).await??;
    let delivered = server
        .metric(
            "dormouse_webhook_deliveries_total",
            &[r#"result="delivered""#],
        )
        .await?;
    ensure!(delivered >= 3.0, "{delivered}");
    server.terminate()?;
    let status = server.exited().await?;
    ensure!(status.success(), "{status}\n{}", server.log.tail());
    let log = server.log.lines().join("\n");
    ensure!(!log.contains(SECRET) && !log.contains("token=abc"), "{log}");
    Ok(lines)
}

const AWAITED: [&str; 4] = [
    "dormouse.model.woke",
    "dormouse.model.slept",
    "dormouse.model.failed",
    "dormouse.server.idle",
];

#[tokio::test]
async fn what_happens_is_told_with_signatures_and_retries() -> Result<()> {
    let receiver = Receiver::start(&AWAITED, &[])?;
    let url = format!("http://127.0.0.1:{}/hook?token=abc", receiver.port);
    let lines = live_and_tell(receiver, &url, "").await?;
    let failures = lines.iter().filter(|line| line.starts_with("event 503"));
    ensure!(failures.count() == 2, "{lines:?}");
    let woke = lines
        .iter()
        .find(|line| line.starts_with("event 204 dormouse.model.woke"))
        .context("no wake was told")?;
    ensure!(woke.contains(r#""model": "simple""#), "{woke}");
    ensure!(woke.contains("took_seconds"), "{woke}");
    Ok(())
}

#[tokio::test]
async fn messages_over_tls_reach_only_who_is_trusted() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (certificate, key) = (
        folder.path().join("cert.pem"),
        folder.path().join("key.pem"),
    );
    let mut command = Command::new("openssl");
    command
        .args([
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
        ])
        .args(["-subj", "/CN=localhost"])
        .args(["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"])
        .args(["-addext", "basicConstraints=critical,CA:FALSE"])
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate);
    if let Err(error) = succeed(&mut command, "openssl makes the receiver's certificate") {
        ensure!(std::env::var_os("CI").is_none(), "{error:#}");
        eprintln!("skipped: messages_over_tls_reach_only_who_is_trusted: {error:#}");
        return Ok(());
    }
    let receiver = Receiver::start(&AWAITED, &[&certificate, &key])?;
    let url = format!("https://localhost:{}/hook", receiver.port);
    let ca_file = format!("ca_file = '{}'", certificate.display());
    // A second hook trusts the public authorities only and must not get through.
    let stranger = format!("[[webhooks]]\nurl = '{url}'\nretries = 0");
    let lines = live_and_tell(receiver, &url, &format!("{ca_file}\n{stranger}")).await?;
    ensure!(lines.len() >= 6, "{lines:?}");
    Ok(())
}
