//! Commands that talk to a running server, this one or any other of the v2 protocol.

mod infer;
mod listing;
mod tensors;
mod timeline;

use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, anyhow};
use dormouse_client::{Client, ClientError, Code, LoadRequest, RetryPolicy};

pub use self::infer::InferArgs;
pub use self::listing::{HealthArgs, ModelsArgs, StatsArgs};
use super::output::{self, FormatArgs, Screen};
use crate::config::parse_span;

/// The commands that talk to a running server.
#[derive(Debug, clap::Subcommand)]
pub enum ClientCommand {
    /// List the models of a server's repository
    Models(ModelsArgs),
    /// Load a model, or load it again
    Load(LoadArgs),
    /// Unload a model
    Unload(UnloadArgs),
    /// Run a model on given, zero or random inputs
    Infer(InferArgs),
    /// Tell whether a server and its models can answer; fails when not
    Health(HealthArgs),
    /// Show what models have done and how long it took
    Stats(StatsArgs),
}

/// Which server, and how to show its answers.
#[derive(Clone, Debug, clap::Args)]
pub struct ConnectionArgs {
    /// The server's gRPC address
    #[arg(
        long,
        env = "DORMOUSE_URL",
        default_value = "http://127.0.0.1:8001",
        global = true
    )]
    pub url: String,
    /// Token that the server knows us by
    #[arg(
        long,
        env = "DORMOUSE_TOKEN",
        hide_env_values = true,
        value_name = "TOKEN",
        global = true
    )]
    pub token: Option<Token>,
    /// Authorities (PEM) to trust instead of the public ones, with https://
    #[arg(long, env = "DORMOUSE_TLS_CA", value_name = "FILE", global = true)]
    pub tls_ca: Option<PathBuf>,
    /// Certificate (PEM) to show to the server
    #[arg(long, value_name = "FILE", requires = "tls_client_key", global = true)]
    pub tls_client_cert: Option<PathBuf>,
    /// Private key (PEM) of that certificate
    #[arg(long, value_name = "FILE", requires = "tls_client_cert", global = true)]
    pub tls_client_key: Option<PathBuf>,
    /// How long to wait for an answer, as in 500ms or 2m
    #[arg(long, default_value = "60s", value_parser = parse_span, global = true)]
    pub timeout: Duration,
    #[command(flatten)]
    pub format: FormatArgs,
}

/// A token, never shown.
#[derive(Clone)]
pub struct Token(String);

impl FromStr for Token {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Load a model, or load it again.
#[derive(Debug, clap::Args)]
pub struct LoadArgs {
    /// The model's name
    pub model: String,
    /// A configuration (JSON, or @FILE) to use instead of the repository's
    #[arg(long, value_name = "JSON")]
    pub config: Option<String>,
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// Unload a model.
#[derive(Debug, clap::Args)]
pub struct UnloadArgs {
    /// The model's name
    pub model: String,
    /// Unload the models it is composed of, too
    #[arg(long)]
    pub dependents: bool,
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// A command line that makes no sense for this model or server.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct UsageError(String);

fn usage(message: impl Into<String>) -> anyhow::Error {
    UsageError(message.into()).into()
}

/// What a command has to say.
#[derive(Debug)]
struct Reply {
    text: String,
    good: bool,
}

impl Reply {
    fn good(text: String) -> Self {
        Self { text, good: true }
    }
}

/// Runs a command and prints its result. The exit code is 0 when all is well, 1 when the server
/// or the model is not (an error returned here means 1, too), and 2 when the command makes no
/// sense.
pub async fn run(command: ClientCommand) -> anyhow::Result<u8> {
    let screen = Screen::of_stdout(command.connection().format.chosen());
    match execute(command, &screen).await {
        Ok(reply) => {
            output::print(&reply.text).context("cannot write the result")?;
            Ok(if reply.good { 0 } else { 1 })
        }
        Err(error) if error.is::<UsageError>() => {
            eprintln!("error: {error}");
            Ok(2)
        }
        Err(error) => Err(error),
    }
}

async fn execute(command: ClientCommand, screen: &Screen) -> anyhow::Result<Reply> {
    // A load that fails has a reason that does not go away by itself.
    let retry = match command {
        ClientCommand::Load(_) | ClientCommand::Unload(_) => RetryPolicy::NEVER,
        _ => RetryPolicy::default(),
    };
    let client = connect(command.connection(), retry).await?;
    match command {
        ClientCommand::Models(arguments) => listing::models(&client, arguments, screen).await,
        ClientCommand::Stats(arguments) => listing::stats(&client, arguments, screen).await,
        ClientCommand::Health(arguments) => listing::health(&client, arguments, screen).await,
        ClientCommand::Infer(arguments) => infer::infer(&client, arguments, screen).await,
        ClientCommand::Load(arguments) => load(&client, arguments, screen).await,
        ClientCommand::Unload(arguments) => unload(&client, arguments, screen).await,
    }
}

impl ClientCommand {
    fn connection(&self) -> &ConnectionArgs {
        match self {
            Self::Models(arguments) => &arguments.connection,
            Self::Load(arguments) => &arguments.connection,
            Self::Unload(arguments) => &arguments.connection,
            Self::Infer(arguments) => &arguments.connection,
            Self::Health(arguments) => &arguments.connection,
            Self::Stats(arguments) => &arguments.connection,
        }
    }
}

async fn load(client: &Client, arguments: LoadArgs, screen: &Screen) -> anyhow::Result<Reply> {
    let mut request = LoadRequest::new(&arguments.model);
    if let Some(config) = arguments.config {
        let json = match config.strip_prefix('@') {
            Some(path) => std::fs::read_to_string(path)
                .map_err(|error| usage(format!("--config: cannot read {path}: {error}")))?,
            None => config,
        };
        if let Err(error) = serde_json::from_str::<serde_json::Value>(&json) {
            return Err(usage(format!("--config is not JSON: {error}")));
        }
        request = request.config(json);
    }
    let started = tokio::time::Instant::now();
    let loaded = client.load(request).await;
    loaded.map_err(|error| explain(client, error, &format!("cannot load {}", arguments.model)))?;
    let took = started.elapsed();
    Ok(Reply::good(if screen.is_json() {
        output::json(&serde_json::json!({
            "model": arguments.model,
            "loaded": true,
            "seconds": took.as_secs_f64(),
        }))
    } else {
        format!("{} loaded in {}\n", arguments.model, output::duration(took))
    }))
}

async fn unload(client: &Client, arguments: UnloadArgs, screen: &Screen) -> anyhow::Result<Reply> {
    let model = arguments.model;
    let unloaded = if arguments.dependents {
        client.unload_dependents(&model).await
    } else {
        client.unload(&model).await
    };
    unloaded.map_err(|error| explain(client, error, &format!("cannot unload {model}")))?;
    Ok(Reply::good(if screen.is_json() {
        output::json(&serde_json::json!({ "model": model, "loaded": false }))
    } else {
        format!("{model} unloaded\n")
    }))
}

/// Connects, or says which address does not answer and what to try.
async fn connect(connection: &ConnectionArgs, retry: RetryPolicy) -> anyhow::Result<Client> {
    let mut builder = Client::builder(&connection.url)
        .connect_timeout(connection.timeout.min(Duration::from_secs(5)))
        .default_deadline(connection.timeout)
        .retry(retry);
    if let Some(Token(token)) = &connection.token {
        builder = builder.token(token);
    }
    let read = |flag: &str, path: &PathBuf| {
        std::fs::read_to_string(path)
            .map_err(|error| usage(format!("--{flag}: cannot read {}: {error}", path.display())))
    };
    if let Some(path) = &connection.tls_ca {
        builder = builder.tls_ca(read("tls-ca", path)?);
    }
    if let (Some(certificate), Some(key)) =
        (&connection.tls_client_cert, &connection.tls_client_key)
    {
        let certificate = read("tls-client-cert", certificate)?;
        builder = builder.tls_identity(certificate, read("tls-client-key", key)?);
    }
    builder.connect().await.map_err(|error| match error {
        ClientError::Setting { .. } => usage(format!("--url: {error}")),
        error => unreachable_server(&connection.url, &error),
    })
}

fn unreachable_server(url: &str, error: &ClientError) -> anyhow::Error {
    let chain = std::iter::successors(Some(error as &dyn std::error::Error), |error| {
        error.source()
    });
    let cause = chain.last().map(ToString::to_string).unwrap_or_default();
    anyhow!(
        "no server answers at {url}: {cause}\n  \
         Start one with `dormouse serve`, or name another with --url or DORMOUSE_URL.\n  \
         It is the gRPC port that is needed (8001 by default), not the HTTP port (8000)."
    )
}

/// An error of a call, with what was being done and, where one is known, a way out.
fn explain(client: &Client, error: ClientError, doing: &str) -> anyhow::Error {
    match &error {
        ClientError::Connect { .. } => unreachable_server(client.url(), &error),
        ClientError::Status {
            code: Code::Unauthenticated,
            ..
        } => anyhow!("{doing}: {error}\n  Name a token with --token or DORMOUSE_TOKEN."),
        ClientError::Deadline { .. } => {
            anyhow!("{doing}: {error}\n  Allow more time with --timeout.")
        }
        ClientError::Status { code, message, .. }
            if matches!(code, Code::Internal | Code::Unknown)
                && ["http2", "invalid compression flag"]
                    .iter()
                    .any(|sign| message.contains(sign)) =>
        {
            anyhow!(
                "{doing}: {} does not speak gRPC; the gRPC port is 8001 by default",
                client.url()
            )
        }
        _ => anyhow!("{doing}: {error}"),
    }
}

#[cfg(test)]
mod tests;
