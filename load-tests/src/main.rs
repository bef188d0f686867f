//! `dormouse-load`: measures live servers on this machine. Every measurement starts its own
//! servers on loopback, ends by itself and prints ratios beside absolute figures.

mod echo;
mod many_models;
mod overhead;
mod overload;
mod process;
mod table;

use clap::{Parser, Subcommand};

/// Measures Dormouse on this machine.
#[derive(Debug, Parser)]
#[command(name = "dormouse-load", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Cost of a request through gRPC, beside a bare echo service with the same messages
    Overhead(overhead::OverheadArgs),
    /// Goodput, refusals and recovery under many times the load that fits
    Overload(overload::OverloadArgs),
    /// Start-up, memory and index of a repository with very many models
    ManyModels(many_models::ManyModelsArgs),
    /// The bare echo service that `overhead` compares with
    #[command(hide = true)]
    Echo,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Overhead(args) => overhead::run(args).await,
        Command::Overload(args) => overload::run(args).await,
        Command::ManyModels(args) => many_models::run(args).await,
        Command::Echo => echo::serve().await,
    }
}
