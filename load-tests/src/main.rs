//! `dormouse-load`: measures live servers on this machine. Every measurement starts its own
//! servers on loopback, ends by itself and prints ratios beside absolute figures. What is only
//! simulated says so.

mod density;
mod echo;
mod give_back;
mod live;
mod many_models;
mod models;
mod outside;
mod overhead;
mod overload;
mod pages;
mod plain;
mod process;
mod samples;
mod simulate;
mod storm;
mod table;
mod trace;
mod undisturbed;
mod wake;

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
    /// Keep-alive policies side by side on a recorded trace, in virtual time
    Simulate(simulate::SimulateArgs),
    /// Wake from zero, parked and cold, beside plain ONNX Runtime and the hardware's floor (15 min)
    Wake(wake::WakeArgs),
    /// A thousand requests at once on a sleeping model: one load, everyone answered (3 min)
    Storm(storm::StormArgs),
    /// Memory of further instances, versions and parked models, beside independent sessions (5 min)
    Density(density::DensityArgs),
    /// Resident memory over 60 loads and unloads of a 400 MB model (4 min)
    GiveBack(give_back::GiveBackArgs),
    /// Latency of a small model while a large one wakes and sleeps (3 min)
    Undisturbed(undisturbed::UndisturbedArgs),
    /// An hour of Azure's trace, compressed, on 100 models with memory for 20 (4 min)
    Trace(trace::TraceArgs),
    /// The independent sessions that `density` compares with
    #[command(hide = true)]
    PlainSessions(density::PlainSessionsArgs),
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
        Command::Simulate(args) => simulate::run(&args),
        Command::Wake(args) => wake::run(args).await,
        Command::Storm(args) => storm::run(args).await,
        Command::Density(args) => density::run(args).await,
        Command::GiveBack(args) => give_back::run(args).await,
        Command::Undisturbed(args) => undisturbed::run(args).await,
        Command::Trace(args) => trace::run(args).await,
        Command::PlainSessions(args) => density::run_plain_sessions(&args),
        Command::Echo => echo::serve().await,
    }
}
