//! How a download is shown: a bar for a person, lines for a log.

use std::fmt;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Hears how far a download is.
pub trait Progress: fmt::Debug + Send + Sync {
    /// A download of about `bytes` begins.
    fn begin(&self, what: &str, bytes: u64);
    /// So many bytes have arrived.
    fn arrived(&self, bytes: u64);
    /// The download is over, well or not.
    fn end(&self);
    /// Something worth saying in between.
    fn note(&self, text: &str);
}

/// A bar when standard error is a terminal, lines otherwise.
pub fn progress() -> Box<dyn Progress> {
    if std::io::stderr().is_terminal() {
        Box::new(Bar(ProgressBar::hidden()))
    } else {
        Box::new(Lines)
    }
}

/// Says nothing.
#[derive(Clone, Copy, Debug)]
pub struct Quiet;

impl Progress for Quiet {
    fn begin(&self, _what: &str, _bytes: u64) {}
    fn arrived(&self, _bytes: u64) {}
    fn end(&self) {}
    fn note(&self, _text: &str) {}
}

#[derive(Debug)]
struct Bar(ProgressBar);

impl Progress for Bar {
    fn begin(&self, what: &str, bytes: u64) {
        let style = ProgressStyle::with_template(
            "{msg} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        )
        .unwrap_or_else(|_| ProgressStyle::default_bar());
        announce(what, bytes);
        self.0.set_message(what.to_owned());
        self.0.reset();
        self.0.set_length(bytes);
        self.0.set_style(style.progress_chars("=> "));
        self.0
            .set_draw_target(indicatif::ProgressDrawTarget::stderr());
        self.0.enable_steady_tick(Duration::from_millis(100));
    }

    fn arrived(&self, bytes: u64) {
        self.0.set_position(bytes);
    }

    fn end(&self) {
        self.0.finish_and_clear();
    }

    fn note(&self, text: &str) {
        self.0.suspend(|| eprintln!("{text}"));
    }
}

/// For a log: where a bar would be noise, its beginning is enough.
#[derive(Debug)]
struct Lines;

impl Progress for Lines {
    fn begin(&self, what: &str, bytes: u64) {
        announce(what, bytes);
    }

    fn arrived(&self, _bytes: u64) {}

    fn end(&self) {}

    fn note(&self, text: &str) {
        eprintln!("{text}");
    }
}

/// A line that stays when the bar is gone.
fn announce(what: &str, bytes: u64) {
    eprintln!("downloading {what} ({:.1} MB) with pip", bytes as f64 / 1e6);
}
