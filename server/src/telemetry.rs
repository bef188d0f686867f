//! Log lines: text for people, JSON for machines, to standard error or a file.

use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;

use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

use crate::config::{LogConfig, LogFormat};
use crate::log_settings::{self, LogFilter};

/// Installs the process's logger. A second call in one process changes nothing.
pub fn init(config: &LogConfig) -> io::Result<()> {
    let filter: LogFilter = match EnvFilter::try_from_default_env() {
        Ok(filter) => Box::new(filter),
        Err(_) => log_settings::filter(config),
    };
    let (filter, handle) = reload::Layer::<LogFilter, Registry>::new(filter);
    let (writer, colours) = match &config.file {
        None => (BoxMakeWriter::new(io::stderr), io::stderr().is_terminal()),
        Some(path) => {
            let file = OpenOptions::new().create(true).append(true).open(path)?;
            (BoxMakeWriter::new(Mutex::new(file)), false)
        }
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(OneLine {
            make: writer,
            colours,
        })
        .with_ansi(colours);
    let lines = match config.format {
        LogFormat::Default => lines.with_target(false).boxed(),
        LogFormat::Json => lines
            .json()
            .flatten_event(true)
            .with_target(false)
            .with_current_span(false)
            .boxed(),
    };
    let logger = tracing_subscriber::registry().with(lines.with_filter(filter));
    // An error means that a logger is there already, as in tests that start several servers.
    if logger.try_init().is_ok() {
        log_settings::install(handle, config.clone());
    }
    Ok(())
}

/// Keeps every event on one line: what clients send may be in it, and must not look like another
/// event, nor move the cursor of who reads it.
struct OneLine<M> {
    make: M,
    /// The logger's own escape sequences stay.
    colours: bool,
}

struct OneLineWriter<W> {
    writer: W,
    colours: bool,
}

impl<'a, M: MakeWriter<'a>> MakeWriter<'a> for OneLine<M> {
    type Writer = OneLineWriter<M::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        OneLineWriter {
            writer: self.make.make_writer(),
            colours: self.colours,
        }
    }
}

impl<W: Write> Write for OneLineWriter<W> {
    /// Takes a whole event: the logger writes each at once.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let line = text.strip_suffix('\n').unwrap_or(&text);
        if !line.contains(char::is_control) {
            self.writer.write_all(event)?;
            return Ok(event.len());
        }
        let mut escaped = String::with_capacity(line.len() + 16);
        for (at, character) in line.char_indices() {
            if character.is_control() && !(self.colours && begins_colour(&line[at..])) {
                escaped.extend(character.escape_default());
            } else {
                escaped.push(character);
            }
        }
        escaped.push('\n');
        self.writer.write_all(escaped.as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

/// Whether `text` begins with a sequence that sets colours and does nothing else.
fn begins_colour(text: &str) -> bool {
    let rest = text.strip_prefix("\x1b[");
    rest.is_some_and(|rest| {
        let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
        rest.starts_with('m')
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(colours: bool, value: &str) -> String {
        let page = Page::default();
        let shared = page.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(colours)
            .with_writer(OneLine {
                make: move || shared.clone(),
                colours,
            })
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(model = %value, "loaded {value}");
        });
        let page = page.0.lock().unwrap().clone();
        String::from_utf8(page).unwrap()
    }

    #[test]
    fn what_clients_send_stays_on_its_line() {
        let forged = "m\n2026-01-01T00:00:00Z  INFO all is well\r\x1b[2J\x07\u{9b}31m";
        for colours in [false, true] {
            let text = logged(colours, forged);
            assert_eq!(text.matches('\n').count(), 1, "{text:?}");
            assert!(
                text.ends_with('\n') && text.contains("m\\n2026"),
                "{text:?}"
            );
            assert!(
                !text.contains("\x1b[2J") && !text.contains(['\r', '\x07', '\u{9b}']),
                "{text:?}"
            );
        }
    }
}
