//! Log lines: text for people, JSON for machines, to standard error or a file.

use std::fs::OpenOptions;
use std::io::{self, IsTerminal};
use std::sync::Mutex;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

use crate::config::{LogConfig, LogFormat};

/// Installs the process's logger. A second call in one process changes nothing.
pub fn init(config: &LogConfig) -> io::Result<()> {
    let level = match config {
        LogConfig { verbose: 2.., .. } => "trace",
        LogConfig { verbose: 1, .. } => "debug",
        LogConfig { info: true, .. } => "info",
        LogConfig { warning: true, .. } => "warn",
        LogConfig { error: true, .. } => "error",
        _ => "off",
    };
    // The protocol stack's own details drown everything else; `RUST_LOG` still reaches them.
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| {
        EnvFilter::new(format!(
            "{level},h2=info,hyper=info,tower=info,tonic=info,ort=warn"
        ))
    });
    let (writer, colours) = match &config.file {
        None => (BoxMakeWriter::new(io::stderr), io::stderr().is_terminal()),
        Some(path) => {
            let file = OpenOptions::new().create(true).append(true).open(path)?;
            (BoxMakeWriter::new(Mutex::new(file)), false)
        }
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(colours);
    // An error means that a logger is there already, as in tests that start several servers.
    let _ = match config.format {
        LogFormat::Default => builder.with_target(false).try_init(),
        LogFormat::Json => builder
            .json()
            .flatten_event(true)
            .with_target(false)
            .with_current_span(false)
            .try_init(),
    };
    Ok(())
}
