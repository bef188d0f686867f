//! The command line.

pub mod client_commands;
pub mod config_command;
pub mod demo;
#[cfg(test)]
mod fake;
pub mod inspect;
pub mod manual;
pub mod output;
pub mod prepare;
pub mod repository;
pub mod serve;
pub mod store;
pub mod triton_flags;
mod waterfall;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Parser, Subcommand};

use crate::activation::Activation;
use crate::config::Config;
use crate::isolation::inside::WorkerArgs;
use crate::{app, assets, memory, process, runtime_library, shutdown, telemetry};
use client_commands::ClientCommand;
use demo::{DemoArgs, DemoParts};
use inspect::InspectArgs;
use serve::ServeArgs;
use store::StoreCommand;

/// Serves ONNX models that sleep at zero and wake when they are called.
#[derive(Debug, Parser)]
#[command(
    name = "dormouse",
    version,
    arg_required_else_help = true,
    after_help = "Start with `dormouse demo`, then `dormouse serve --model-repository DIR`.\n\
                  The commands from models to stats talk to a running server (--url)."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a Triton-style model repository over KServe v2 gRPC and HTTP
    Serve(Box<ServeArgs>),
    /// Show the whole story on a real model: wake, answer, go back to zero
    Demo(DemoArgs),
    /// Show the files and tensors of a model and what loading it will take
    Inspect(InspectArgs),
    /// Prepare models ahead of time, so that even their first wake is fast
    Prepare(prepare::PrepareArgs),
    /// Find or fetch the ONNX Runtime library
    #[command(subcommand)]
    Runtime(RuntimeCommand),
    /// Look into the store of prepared models, check it, clear it up
    #[command(subcommand)]
    Store(StoreCommand),
    /// Run models for a server, which starts this itself
    #[command(hide = true)]
    Worker(WorkerArgs),
    /// Write the index of a repository for a web server
    #[command(subcommand)]
    Repository(repository::RepositoryCommand),
    #[command(flatten)]
    Client(ClientCommand),
    /// Check a configuration file, or print what may be in one
    #[command(subcommand)]
    Config(config_command::ConfigCommand),
    /// Print a script that completes this command line in a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print a manual page, or write all of them
    Man(manual::ManArgs),
}

#[derive(Debug, Subcommand)]
pub enum RuntimeCommand {
    /// Fetch the ONNX Runtime library into Dormouse's cache, through pip as you configured it
    Install,
    /// Print which ONNX Runtime library would be used
    Path {
        /// The library to use instead of searching for one, as for `serve`
        #[arg(long, value_name = "FILE")]
        onnxruntime_library: Option<PathBuf>,
    },
}

/// A command line, ready to run.
#[derive(Debug)]
pub struct Invocation {
    pub command: Command,
    /// Triton's flags that were dropped.
    pub ignored: Vec<String>,
}

/// Reads the command line; ends the process with a message when it cannot be understood.
/// Called by the name `tritonserver`, it takes Triton's flags without a subcommand.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Invocation {
    let mut args: Vec<String> = args
        .into_iter()
        .map(|arg| arg.to_string_lossy().into_owned())
        .collect();
    let called_as = args
        .first()
        .and_then(|program| Path::new(program).file_name())
        .unwrap_or_default();
    if called_as == "tritonserver" && args.get(1).map(String::as_str) != Some("serve") {
        args.insert(1, "serve".to_owned());
    }
    let mut ignored = Vec::new();
    if args.get(1).map(String::as_str) == Some("serve") {
        match triton_flags::filter(args) {
            Ok(filtered) => {
                args = filtered.args;
                ignored = filtered.ignored;
            }
            Err(message) => {
                use clap::CommandFactory;
                Cli::command()
                    .error(clap::error::ErrorKind::UnknownArgument, message)
                    .exit()
            }
        }
    }
    let cli = Cli::parse_from(args);
    Invocation {
        command: cli.command,
        ignored,
    }
}

/// Runs a command to its end and tells how the process is to end: 0 done, 1 failed, 2 when
/// the command makes no sense.
pub async fn run_to_exit_code(invocation: Invocation, activation: Activation) -> u8 {
    match run(invocation, activation).await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            1
        }
    }
}

async fn run(invocation: Invocation, activation: Activation) -> anyhow::Result<u8> {
    match invocation.command {
        Command::Serve(args) => serve(&args, &invocation.ignored, &activation).await,
        Command::Demo(args) => demonstrate(args).await,
        Command::Prepare(args) => prepare::run(args).await,
        Command::Repository(command) => {
            tokio::task::spawn_blocking(move || repository::run(&command)).await??;
            Ok(0)
        }
        Command::Inspect(args) => {
            tokio::task::spawn_blocking(move || inspect::run(&args)).await??;
            Ok(0)
        }
        Command::Runtime(RuntimeCommand::Install) => {
            let installing =
                tokio::task::spawn_blocking(
                    || runtime_library::run_install(&mut std::io::stdout()),
                );
            installing.await??;
            Ok(0)
        }
        Command::Runtime(RuntimeCommand::Path {
            onnxruntime_library,
        }) => {
            runtime_library::run_path(onnxruntime_library.as_deref(), &mut std::io::stdout())?;
            Ok(0)
        }
        Command::Store(command) => store::run(command).await,
        Command::Worker(_) => anyhow::bail!("workers are started by servers, and by nobody else"),
        Command::Client(command) => client_commands::run(command).await,
        Command::Config(command) => config_command::run(&command),
        Command::Completions { shell } => manual::print_completions(shell),
        Command::Man(args) => manual::run(&args),
    }
}

async fn serve(
    args: &ServeArgs,
    ignored: &[String],
    activation: &Activation,
) -> anyhow::Result<u8> {
    let config = Config::resolve(args)?;
    telemetry::init(&config.log)?;
    for flag in ignored {
        tracing::warn!(flag, "flag has no meaning here and is ignored");
    }
    shutdown::outlive_file_limit()?;
    process::use_all_descriptors();
    let finished = app::run(config, activation, shutdown::requested()?).await?;
    Ok(u8::from(!finished))
}

/// Fetches what the demonstration needs and runs it on a server of its own.
async fn demonstrate(args: DemoArgs) -> anyhow::Result<u8> {
    let (library, magika) = tokio::task::spawn_blocking(|| {
        let progress = assets::progress();
        let library = match runtime_library::locate(None) {
            Ok(library) => library,
            Err(_) => runtime_library::install(&*progress)?.library,
        };
        anyhow::Ok((library, assets::magika(&*progress)?))
    })
    .await??;
    let parts = DemoParts {
        model: magika.model,
        config: magika.config,
        content_types: magika.content_types,
        resident_bytes: memory::resident_bytes,
    };
    demo::run(args, parts, async |repository| {
        let loopback = Some("127.0.0.1".to_owned());
        let serve = ServeArgs {
            model_repository: vec![repository.to_owned()],
            onnxruntime_library: Some(library),
            http_address: loopback.clone(),
            http_port: Some(0),
            grpc_address: loopback.clone(),
            grpc_port: Some(0),
            metrics_address: loopback,
            metrics_port: Some(0),
            log_info: Some(false),
            ..ServeArgs::default()
        };
        let config = Config::resolve(&serve)?;
        telemetry::init(&config.log)?;
        let server = app::Server::start(config).await?;
        let grpc = server
            .grpc_address()
            .context("the server listens for gRPC")?;
        Ok(DemoServer { server, grpc })
    })
    .await?;
    Ok(0)
}

struct DemoServer {
    server: app::Server,
    grpc: SocketAddr,
}

impl demo::DemoServer for DemoServer {
    fn grpc_address(&self) -> SocketAddr {
        self.grpc
    }

    fn is_warm(&self, model: &str) -> bool {
        self.server.service().registry().is_warm(model)
    }

    async fn shutdown(self) -> anyhow::Result<()> {
        self.server.shutdown().await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn a_version_after_a_command_is_the_models() {
        let line = ["dormouse", "infer", "add", "--version", "3"].map(OsString::from);
        let Command::Client(ClientCommand::Infer(arguments)) = parse(line).command else {
            panic!("another command");
        };
        assert_eq!(arguments.version.as_deref(), Some("3"));
    }
}
