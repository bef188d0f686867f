//! The page at `/`, in a real browser.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::authority::Files;
use crate::deadlines::ONE_AT_A_TIME;
use crate::http;
use crate::python::succeed;
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, target_dir};

/// What drives the browser.
const DRIVER: &str = "playwright-core@1.56.1";

/// Debian's name first.
const BROWSERS: [&str; 4] = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
];

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut places = std::env::split_paths(&path).map(|folder| folder.join(program));
    places.find(|place| place.is_file())
}

/// The browser and node, or none where they are not installed. In CI they have to be.
fn browser() -> Result<Option<(PathBuf, PathBuf)>> {
    let chromium = BROWSERS.iter().find_map(|name| on_path(name));
    let node = on_path("node").filter(|_| on_path("npm").is_some());
    match chromium.zip(node) {
        Some(found) => Ok(Some(found)),
        None => {
            ensure!(
                std::env::var_os("CI").is_none(),
                "chromium, node and npm are needed to test the page: apt-get install chromium nodejs npm"
            );
            eprintln!("SKIPPED: the page was not tested: chromium, node or npm is missing");
            Ok(None)
        }
    }
}

/// A folder with the driver in it, made once. Blocks: the first time it is fetched.
fn driver() -> Result<PathBuf> {
    let folder = target_dir().join("node");
    fs::create_dir_all(&folder)?;
    let lock = File::create(folder.join("lock"))?;
    lock.lock()
        .context("cannot lock the folder of the driver")?;
    let finished = folder.join("finished");
    if !fs::read_to_string(&finished).is_ok_and(|found| found == DRIVER) {
        let mut install = Command::new("npm");
        install
            .args([
                "install",
                "--no-audit",
                "--no-fund",
                "--no-save",
                "--prefix",
            ])
            .arg(&folder)
            .arg(DRIVER);
        succeed(&mut install, "npm must be able to install playwright-core")?;
        fs::write(finished, DRIVER)?;
    }
    Ok(folder)
}

fn models() -> Result<TestRepository> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let sleepy = r#"parameters { key: "dormouse.keep_alive" value { string_value: "off" } }"#;
    repository.add("sleepy", Model::new("add_sub").config(sleepy))?;
    repository.add("echo", Model::new("identity_bytes"))?;
    repository.add("broken", Model::new("corrupt"))?;
    repository.add("slow", Model::new("slow").config(ONE_AT_A_TIME))?;
    Ok(repository)
}

/// Has a browser look at a server's page; where there is none, nothing happens.
async fn visit(server: &TestServer, arguments: &[&str]) -> Result<()> {
    let Some((chromium, node)) = browser()? else {
        return Ok(());
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser/page.mjs");
    let mut command = Command::new(node);
    command.arg(script).args(arguments);
    command.arg("--url").arg(format!("http://{}/", server.http));
    command.arg("--chromium").arg(chromium);
    let run = move || -> Result<()> {
        command.arg("--modules").arg(driver()?);
        let output = succeed(&mut command, "the page does not work")?;
        eprint!("{}", String::from_utf8_lossy(&output.stdout));
        Ok(())
    };
    let outcome = tokio::task::spawn_blocking(run).await?;
    outcome.with_context(|| format!("the server's log:\n{}", server.log.tail()))
}

#[tokio::test]
async fn the_page_works_in_a_browser() -> Result<()> {
    let repository = models()?;
    let server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .arg("--load-model=*")
        .arg("--exit-on-error=false")
        .arg("--strict-readiness=false")
        // However slow the browser is, models that are awake stay so.
        .arg("--keep-alive=1h")
        .arg("--staged-exit=false")
        .start()
        .await?;
    visit(&server, &[]).await
}

#[tokio::test]
async fn the_page_of_a_server_that_asks_for_tokens_lets_each_do_what_they_may() -> Result<()> {
    let files = Files::new()?;
    let entry = |name: &str, scope: &str| {
        format!(
            "[[token]]\nname = \"{name}\"\ntoken = \"{name}-0123456789\"\nscopes = [\"{scope}\"]\n"
        )
    };
    let (runner, manager) = (entry("runner", "inference"), entry("manager", "management"));
    files.put("tokens.toml", &(runner + &manager))?;
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    repository.add("echo", Model::new("identity_bytes"))?;
    let server = TestServer::over(&repository)
        .arg(files.flag("auth-tokens", "tokens.toml"))
        .arg("--model-control-mode=explicit")
        .arg("--load-model=*")
        .arg("--keep-alive=1h")
        .arg("--staged-exit=false")
        .start()
        .await?;
    let tokens = ["--runner=runner-0123456789", "--manager=manager-0123456789"];
    visit(&server, &tokens).await
}

#[tokio::test]
async fn the_page_can_be_switched_off() -> Result<()> {
    let repository = models()?;
    let server = TestServer::over(&repository)
        .arg("--page=false")
        .start()
        .await?;
    for path in ["/", "/page/app.js"] {
        let answer = server.get(path).await?;
        ensure!(answer.status == 404, "{path}: {}", answer.status);
        ensure!(answer.error()?.contains("--page"), "{}", answer.text());
    }
    // What it shows is an endpoint like any other.
    let answer = server.get("/v2/dormouse/overview").await?;
    ensure!(answer.status == 200, "{}", answer.text());
    Ok(())
}

#[tokio::test]
async fn the_overview_tells_of_stages_and_wakes_nobody() -> Result<()> {
    let repository = models()?;
    let server = TestServer::over(&repository).start().await?;
    let stage = async |name: &str| -> Result<serde_json::Value> {
        let path = format!("/v2/dormouse/overview?search={name}");
        let overview = server.get(&path).await?.json()?;
        let models = overview["models"].as_array().context("a list")?.clone();
        ensure!(models.len() == 1, "{models:?}");
        Ok(models[0].clone())
    };
    let before = stage("simple").await?;
    ensure!(before["stage"] == "asleep", "{before}");
    ensure!(before["memory_bytes"] == 0, "{before}");
    let client = server.grpc().await?;
    crate::wire::infer(&client, crate::wire::add_sub("simple", 2, 1)).await?;
    let after = stage("SIMPLE").await?;
    ensure!(after["stage"] == "awake", "{after}");
    ensure!(after["memory_bytes"].as_u64() > Some(0), "{after}");
    ensure!(after["counters"]["success"]["count"] == 1, "{after}");
    ensure!(after["counters"]["cold_starts"] == 1, "{after}");
    let wrong = http::call(
        server.http,
        "GET",
        "/v2/dormouse/overview?limit=x",
        &[],
        b"",
    )
    .await?;
    ensure!(wrong.status == 400, "{}", wrong.text());
    Ok(())
}
