//! A server in this process, over the models that the scenarios name.

use clap::Parser;
use dormouse_server::app::Server;
use dormouse_server::cli::serve::ServeArgs;
use dormouse_server::config::Config;

use crate::drive::target::Target;
use crate::plain;
use crate::process::metric;
use crate::repository;

/// Stands in for the real one, which is downloaded.
const MAGIKA: &[u8] = include_bytes!("../../../../server/tests/models/identity_int32.onnx");

/// Has the inputs of the real one, which is downloaded.
const MINILM: &[u8] = include_bytes!("../../../../server/tests/models/tokens.onnx");

#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(flatten)]
    serve: ServeArgs,
}

pub(super) struct TestServer {
    server: Server,
    _files: tempfile::TempDir,
}

impl TestServer {
    pub(super) async fn start(flags: &[&str]) -> Self {
        let files = tempfile::tempdir().unwrap();
        let models = files.path().join("models");
        repository::lay_out(&models).unwrap();
        repository::add(&models, "magika", MAGIKA).unwrap();
        repository::add(&models, "minilm", MINILM).unwrap();
        let mut line = vec![
            format!("--model-repository={}", models.display()),
            format!(
                "--onnxruntime-library={}",
                plain::library().unwrap().display()
            ),
            format!("--store={}", files.path().join("store").display()),
        ];
        let fixed = [
            "--http-address=127.0.0.1",
            "--http-port=0",
            "--grpc-address=127.0.0.1",
            "--grpc-port=0",
            "--allow-metrics=false",
            "--memory-budget=unlimited",
        ];
        line.extend(fixed.iter().chain(flags).map(ToString::to_string));
        let serve = Line::try_parse_from(line).unwrap().serve;
        let server = Server::start(Config::resolve(&serve).unwrap())
            .await
            .unwrap();
        Self {
            server,
            _files: files,
        }
    }

    pub(super) fn grpc(&self) -> Target {
        Target::at(format!("grpc://{}", self.server.grpc_address().unwrap()))
    }

    pub(super) fn http(&self) -> Target {
        Target::at(format!("http://{}", self.server.http_address().unwrap()))
    }

    /// Requests it has answered so far.
    pub(super) fn answered(&self) -> f64 {
        let text = self.server.service().render_metrics();
        metric(&text, "nv_inference_request_success", &[]).unwrap_or(0.0)
    }

    pub(super) async fn stop(self) {
        self.server.shutdown().await;
    }
}
