//! What a run tells while it runs, and how it is told to end.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::watch;

use super::recorder::Glance;

/// Live figures on a terminal where there is one, and the wish to stop.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    stop: watch::Receiver<bool>,
}

/// Ends runs early.
#[derive(Debug)]
pub(crate) struct Stopper(watch::Sender<bool>);

impl Progress {
    /// Says nothing; the stopper ends the run.
    pub(crate) fn silent() -> (Self, Stopper) {
        let (sender, stop) = watch::channel(false);
        (Self { bar: None, stop }, Stopper(sender))
    }

    /// Says nothing and runs to the end.
    pub(crate) fn quiet() -> Self {
        Self::silent().0
    }

    /// Draws a line on standard error where that is a terminal; the stopper ends the run.
    pub(crate) fn live() -> (Self, Stopper) {
        let (sender, stop) = watch::channel(false);
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = "{prefix} {wide_bar:.green} {elapsed_precise}/{len} s  {msg}";
            let bar = ProgressBar::new(0);
            if let Ok(style) = ProgressStyle::with_template(style) {
                bar.set_style(style);
            }
            bar
        });
        (Self { bar, stop }, Stopper(sender))
    }

    /// One that is stopped together with this one, and draws nothing.
    pub(crate) fn without_bar(&self) -> Self {
        Self {
            bar: None,
            stop: self.stop.clone(),
        }
    }

    /// Whether it was told to stop.
    pub(crate) fn is_stopped(&self) -> bool {
        *self.stop.borrow()
    }

    /// Waits until it is told to stop.
    pub(crate) async fn stopped(&self) {
        let mut stop = self.stop.clone();
        if stop.wait_for(|stop| *stop).await.is_err() {
            // Nobody is left who could say so.
            std::future::pending().await
        }
    }

    pub(crate) fn begin(&self, label: &str, length: Duration) {
        if let Some(bar) = &self.bar {
            bar.reset();
            bar.set_length(length.as_secs().max(1));
            bar.set_prefix(label.to_owned());
            bar.set_message("warming up");
            bar.enable_steady_tick(Duration::from_millis(250));
        }
    }

    pub(crate) fn show(&self, passed: Duration, glance: Glance) {
        if let Some(bar) = &self.bar {
            bar.set_position(passed.as_secs());
            let Glance {
                per_second,
                p50,
                p99,
                errors,
                cold,
            } = glance;
            bar.set_message(format!(
                "{per_second:.0}/s  p50 {p50:.2} ms  p99 {p99:.2} ms  {errors} errors  {cold} cold"
            ));
        }
    }

    /// Says what happens when figures would not.
    pub(crate) fn say(&self, words: String) {
        if let Some(bar) = &self.bar {
            bar.set_message(words);
        }
    }

    pub(crate) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Stopper {
    /// Ends the run with what it has.
    pub(crate) fn stop(&self) {
        self.0.send_replace(true);
    }
}
