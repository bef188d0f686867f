//! The description of the HTTP API, compared with what the server does by a tool made for that.

use std::process::Command;

use anyhow::{Result, ensure};

use crate::foreign::prepare;
use crate::python::succeed;
use crate::repository::{Model, TestRepository};
use crate::server::TestServer;

const SCHEMATHESIS: (&str, &[&str]) = ("schemathesis", &["schemathesis==4.32.5"]);

#[tokio::test]
async fn the_server_does_what_its_description_says() -> Result<()> {
    let repository = TestRepository::new()?;
    // The one that the description has as its example.
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .arg("--load-model=simple")
        .arg("--allow-client-shm=true")
        .start()
        .await?;
    let environment = prepare(SCHEMATHESIS).await?;
    let examples = std::env::var("DORMOUSE_SCHEMATHESIS_EXAMPLES").unwrap_or("8".to_owned());
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(environment.root().join("bin/schemathesis"));
    command
        .arg("run")
        .arg(format!("http://{}/openapi.json", server.http))
        .args(["--phases", "examples,fuzzing"])
        .args(["--max-examples", &examples])
        .args(["--seed", "7", "--generation-deterministic", "--no-color"])
        // Their answer, 501, counts as a fault of the server's.
        .args(["--exclude-tag", "not supported"])
        // Unloading the example would make every later one fail.
        .args(["--exclude-operation-id", "unloadModel"])
        // Values that fit the schema and not the model are refused, and rightly so.
        .args(["--exclude-checks", "positive_data_acceptance"])
        .current_dir(folder.path());
    let check = move || succeed(&mut command, "the description is not what the server does");
    let output = tokio::task::spawn_blocking(check).await??;
    eprint!("{}", String::from_utf8_lossy(&output.stdout));
    let mut server = server;
    server.assert_healthy().await?;
    let described = server.get("/openapi.json").await?;
    ensure!(described.header("content-type") == Some("application/json"));
    Ok(())
}
