//! Triton's logging extension: which levels are logged, changed while the server runs. Where the
//! log goes and what it looks like is decided when the server starts.

use std::sync::OnceLock;

use parking_lot::Mutex;
use tracing::Level;
use tracing_subscriber::filter::{FilterExt, filter_fn};
use tracing_subscriber::layer::Filter;
use tracing_subscriber::{EnvFilter, Registry, reload};

use crate::config::{LogConfig, LogFormat};
use crate::error::ServeError;

/// What decides whether an event is logged.
pub type LogFilter = Box<dyn Filter<Registry> + Send + Sync>;

/// A setting's value, in any protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Flag(bool),
    Number(u64),
    Text(String),
}

/// The one logger of the process.
static LOGGER: OnceLock<Logger> = OnceLock::new();

struct Logger {
    filter: reload::Handle<LogFilter, Registry>,
    settings: Mutex<LogConfig>,
}

/// Remembers how the process's logger is told of other settings.
pub(crate) fn install(filter: reload::Handle<LogFilter, Registry>, settings: LogConfig) {
    // A second logger in one process is not installed either.
    let _ = LOGGER.set(Logger {
        filter,
        settings: Mutex::new(settings),
    });
}

/// The filter of these settings.
pub(crate) fn filter(settings: &LogConfig) -> LogFilter {
    let most = match settings {
        LogConfig { verbose: 2.., .. } => "trace",
        LogConfig { verbose: 1, .. } => "debug",
        LogConfig { info: true, .. } => "info",
        LogConfig { warning: true, .. } => "warn",
        LogConfig { error: true, .. } => "error",
        _ => "off",
    };
    // The protocol stack's own details drown everything else; `RUST_LOG` still reaches them.
    let detail = EnvFilter::new(format!(
        "{most},h2=info,hyper=info,tower=info,tonic=info,ort=warn"
    ));
    let (info, warning, error) = (settings.info, settings.warning, settings.error);
    let levels = filter_fn(move |metadata| match *metadata.level() {
        Level::ERROR => error,
        Level::WARN => warning,
        Level::INFO => info,
        _ => true,
    });
    Box::new(detail.and(levels))
}

/// The settings that hold now, in Triton's names.
pub fn current() -> Result<Vec<(&'static str, Value)>, ServeError> {
    let settings = logger()?.settings.lock();
    let format = match settings.format {
        LogFormat::Default => "default",
        LogFormat::Json => "json",
    };
    Ok(vec![
        // The path is the operator's business.
        ("log_file", Value::Text(String::new())),
        ("log_info", Value::Flag(settings.info)),
        ("log_warning", Value::Flag(settings.warning)),
        ("log_error", Value::Flag(settings.error)),
        ("log_verbose_level", Value::Number(settings.verbose.into())),
        ("log_format", Value::Text(format.to_owned())),
    ])
}

/// Changes settings: every one of `changes` or none.
pub fn update(changes: &[(String, Value)]) -> Result<(), ServeError> {
    let logger = logger()?;
    let mut settings = logger.settings.lock();
    let mut next = settings.clone();
    for (name, value) in changes {
        change(&mut next, name, value)?;
    }
    if next == *settings {
        return Ok(());
    }
    logger
        .filter
        .reload(filter(&next))
        .map_err(|_| ServeError::unavailable("the log is being closed"))?;
    *settings = next;
    Ok(())
}

fn logger() -> Result<&'static Logger, ServeError> {
    LOGGER.get().ok_or_else(|| {
        ServeError::unsupported("this process has no log of its own whose settings could be told")
    })
}

fn change(settings: &mut LogConfig, name: &str, value: &Value) -> Result<(), ServeError> {
    match (name, value) {
        ("log_file", _) => {
            return Err(ServeError::unsupported(
                "log file location can not be updated through network protocol",
            ));
        }
        ("log_info", Value::Flag(on)) => settings.info = *on,
        ("log_warning", Value::Flag(on)) => settings.warning = *on,
        ("log_error", Value::Flag(on)) => settings.error = *on,
        ("log_verbose_level", Value::Number(level)) => {
            settings.verbose = u32::try_from(*level).unwrap_or(u32::MAX);
        }
        ("log_format", Value::Text(format)) => {
            let format = match format.as_str() {
                "default" | "ISO8601" => LogFormat::Default,
                "json" => LogFormat::Json,
                _ => return Err(unexpected(name, value, "'default', 'ISO8601' or 'json'")),
            };
            if format != settings.format {
                return Err(ServeError::unsupported(
                    "'log_format' is chosen when the server starts (--log-format)",
                ));
            }
        }
        ("log_info" | "log_warning" | "log_error", _) => {
            return Err(unexpected(name, value, "true or false"));
        }
        ("log_verbose_level", _) => {
            return Err(unexpected(name, value, "a whole number from 0"));
        }
        ("log_format", _) => return Err(unexpected(name, value, "a string")),
        _ => {
            let shown: String = name.chars().take(64).collect();
            return Err(ServeError::invalid(format!(
                "unknown log setting '{}': expected log_info, log_warning, log_error, log_verbose_level or log_format",
                shown.escape_debug()
            )));
        }
    }
    Ok(())
}

fn unexpected(name: &str, value: &Value, expected: &str) -> ServeError {
    let got = match value {
        Value::Flag(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::Text(text) => {
            let shown: String = text.chars().take(64).collect();
            format!("'{}'", shown.escape_debug())
        }
    };
    ServeError::invalid(format!(
        "unexpected value for log setting '{name}': expected {expected}, got {got}"
    ))
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::Layer;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    fn settings() -> LogConfig {
        LogConfig {
            format: LogFormat::Default,
            verbose: 0,
            info: true,
            warning: true,
            error: true,
            file: None,
        }
    }

    #[test]
    fn wrong_settings_are_named() {
        let text = |text: &str| Value::Text(text.to_owned());
        for (name, value, expected) in [
            ("log_file", text("/etc/passwd"), "can not be updated"),
            (
                "log_info",
                Value::Number(3),
                "'log_info': expected true or false, got 3",
            ),
            ("log_verbose_level", text("many"), "expected a whole number"),
            ("log_format", text("xml"), "expected 'default'"),
            ("log_format", text("json"), "--log-format"),
            (
                "log_level",
                Value::Flag(true),
                "unknown log setting 'log_level'",
            ),
        ] {
            let error = change(&mut settings(), name, &value).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
        }
    }

    #[test]
    fn each_level_has_its_own_switch() {
        let mut changed = settings();
        change(&mut changed, "log_warning", &Value::Flag(false)).unwrap();
        change(&mut changed, "log_verbose_level", &Value::Number(2)).unwrap();
        change(
            &mut changed,
            "log_format",
            &Value::Text("ISO8601".to_owned()),
        )
        .unwrap();
        assert_eq!((changed.warning, changed.verbose), (false, 2));
        let seen = |settings: &LogConfig| {
            let layer = tracing_subscriber::fmt::layer().with_writer(std::io::sink);
            let subscriber =
                tracing_subscriber::registry().with(layer.with_filter(filter(settings)));
            tracing::subscriber::with_default(subscriber, || {
                [
                    tracing::enabled!(Level::ERROR),
                    tracing::enabled!(Level::WARN),
                    tracing::enabled!(Level::INFO),
                    tracing::enabled!(Level::TRACE),
                ]
            })
        };
        assert_eq!(seen(&settings()), [true, true, true, false]);
        assert_eq!(seen(&changed), [true, false, true, true]);
    }
}
