use dormouse_model_store::spec::KeepAliveSpec;
use std::fs;
use std::path::Path;
use std::time::Duration;

use clap::Parser;

use super::*;
use crate::cli::{Cli, Command};

fn serve(args: &[&str]) -> ServeArgs {
    let args = ["dormouse", "serve"].iter().chain(args);
    match Cli::try_parse_from(args).unwrap().command {
        Command::Serve(args) => *args,
        other => panic!("{other:?}"),
    }
}

fn resolve(args: &[&str]) -> Result<Config, String> {
    Config::resolve(&serve(args)).map_err(|error| error.to_string())
}

fn check_file(path: &Path) -> Result<Config, ConfigError> {
    let args = ServeArgs {
        config: Some(path.to_owned()),
        ..ServeArgs::default()
    };
    Config::resolve(&args)
}

#[test]
fn every_example_file_is_a_configuration() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let mut seen = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "toml")
        {
            check_file(&path).unwrap_or_else(|error| panic!("{error}"));
            seen += 1;
        }
    }
    assert!(seen >= 3);
}

#[test]
fn the_full_example_states_the_defaults() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/server.toml");
    let defaults = resolve(&["--model-repository=/models"]).unwrap();
    assert_eq!(check_file(&path).unwrap(), defaults);
}

#[test]
fn a_flag_wins_over_the_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(
        file.path(),
        "[repository]\npaths = [\"/a\"]\n[http]\nport = 1\n[grpc]\nport = 2\n[lifecycle]\nkeep_alive = \"7s\"\n",
    )
    .unwrap();
    let path = file.path().to_str().unwrap();
    let config = resolve(&["--config", path, "--http-port=9"]).unwrap();
    assert_eq!(config.http.unwrap().address.port(), 9);
    assert_eq!(config.grpc.unwrap().address.port(), 2);
    assert_eq!(
        config.wake.keep_alive,
        KeepAliveSpec::For(Duration::from_secs(7))
    );
}

#[test]
fn unknown_keys_and_wrong_values_are_refused_by_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    for (text, expected) in [
        ("[htpp]\nport = 1\n", "htpp"),
        ("[http]\nmax_input_size = \"64 parsecs\"\n", "not a size"),
        ("[lifecycle]\nkeep_alive = \"soon\"\n", "keep_alive"),
        ("[repository]\ncontrol_mode = \"always\"\n", "always"),
    ] {
        fs::write(file.path(), text).unwrap();
        let error = resolve(&["--model-repository=/m", "--config", path]).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    for (args, expected) in [
        (vec![], "--model-repository"),
        (
            vec!["--model-repository=/m", "--http-address=nowhere"],
            "--http-address",
        ),
        (
            vec!["--model-repository=/m", "--grpc-max-input-size=3GiB"],
            "--grpc-max-input-size",
        ),
        (
            vec![
                "--model-repository=/m",
                "--allow-http=0",
                "--allow-grpc=false",
            ],
            "--allow-http",
        ),
        (
            vec!["--model-repository=/m", "--model-load-thread-count=0"],
            "--model-load-thread-count",
        ),
        (
            vec![
                "--model-repository=/m",
                "--backend-config=onnxruntime,threads=2",
            ],
            "threads",
        ),
    ] {
        let error = resolve(&args).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_usual_command_lines_of_triton_and_kserve_are_taken() {
    let kserve = resolve(&[
        "--model-store=/mnt/models",
        "--grpc-port=9000",
        "--http-port=8080",
        "--allow-grpc=true",
        "--allow-http=true",
    ])
    .unwrap();
    assert_eq!(kserve.grpc.unwrap().address.port(), 9000);
    let mesh = resolve(&[
        "--model-repository",
        "/models",
        "--model-control-mode=explicit",
        "--strict-model-config=false",
        "--strict-readiness=false",
        "--load-model=a",
        "--load-model=b",
        "--log-verbose=1",
        "--backend-config=onnxruntime,default-max-batch-size=16",
    ])
    .unwrap();
    assert_eq!(mesh.control, ControlMode::Explicit);
    assert_eq!(mesh.startup_models, ["a", "b"]);
    assert!(mesh.auto_complete && !mesh.strict_readiness);
    assert_eq!(mesh.engine.default_max_batch_size, 16);
}
