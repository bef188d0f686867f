//! `dormouse-load`: measures live servers. `run` drives any server of the v2 protocol; every other
//! measurement starts its own servers on loopback and prints ratios beside absolute figures. All
//! end by themselves. What is only simulated says so.

mod bare;
mod bars;
mod burst;
mod compare;
mod density;
mod drive;
mod frames;
mod give_back;
mod hostile;
mod isolation;
mod live;
mod many_models;
mod models;
mod outside;
mod overhead;
mod overload;
mod pages;
mod plain;
mod process;
mod record;
mod repository;
mod results;
mod run;
mod samples;
mod simulate;
mod soak;
mod storm;
mod table;
mod ticks;
mod trace;
mod undisturbed;
mod victim;
mod wake;

use std::ffi::OsString;

use clap::{Parser, Subcommand};
use dormouse_server::{activation::Activation, cli};

/// Drives v2 servers, and measures Dormouse on this machine.
#[derive(Debug, Parser)]
#[command(name = "dormouse-load", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Drive any v2 server by a scenario, over gRPC or HTTP
    Run(Box<run::RunArgs>),
    /// Write a model repository for the scenarios
    Repository(repository::RepositoryArgs),
    /// Servers that users know, side by side on the same models with the same load (45 min)
    Compare(compare::CompareArgs),
    /// Write docs/results.md from the JSON of measurements
    Results(results::ResultsArgs),
    /// A mixed load with killed clients: memory's slope, exact counters (30 min)
    Soak(soak::SoakArgs),
    /// Floods of requests, connections, bytes and frames, slow clients, no file descriptors left (10 min)
    Hostile(hostile::HostileArgs),
    /// What a process of its own costs a model, and how soon it is back after kill -9 (3 min)
    Isolation(isolation::IsolationArgs),
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
    /// Memory of further instances, versions and parked models, beside independent sessions (12 min)
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
    /// `dormouse serve` of the library that this program was built with, for tests
    #[command(hide = true)]
    Serve {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// The processes of isolated models of such a server
    #[command(hide = true)]
    Worker(dormouse_server::isolation::inside::WorkerArgs),
    /// The bare echo service that `overhead` compares with
    #[command(hide = true)]
    Echo,
}

fn main() -> anyhow::Result<()> {
    let command = Cli::parse().command;
    if let Command::Worker(args) = &command {
        // Before there is a second thread or a file of our own.
        dormouse_server::isolation::inside::run(args)
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.enable_all().build()?.block_on(run_command(command))
}

async fn run_command(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Run(args) => run::run(*args).await,
        Command::Repository(args) => repository::run(&args),
        Command::Compare(args) => compare::run(args).await,
        Command::Results(args) => results::run(args).await,
        Command::Soak(args) => soak::run(args).await,
        Command::Hostile(args) => hostile::run(args).await,
        Command::Isolation(args) => isolation::run(args).await,
        Command::Serve { arguments } => serve(arguments).await,
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
        Command::Echo => bare::serve_echo().await,
        Command::Worker(args) => dormouse_server::isolation::inside::run(&args),
    }
}

async fn serve(arguments: Vec<OsString>) -> ! {
    let line = ["dormouse", "serve"].map(OsString::from);
    let invocation = cli::parse(line.into_iter().chain(arguments));
    let code = cli::run_to_exit_code(invocation, Activation::default()).await;
    dormouse_server::process::exit_now(code)
}
