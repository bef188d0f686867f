//! HTTP/2 connections that nobody uses: they answer pings, so nothing else would end them.

use std::future::pending;
use std::time::Duration;

use tokio::time::Instant;

use super::guard::Requests;
use crate::limits::Limit;

/// How often an idle connection is looked at before its time is over.
const LOOKS: u32 = 8;
/// How long a client may take to confirm that it sends no more requests, before its connection is
/// closed all the same.
const FAREWELL: Duration = Duration::from_secs(3);

/// How long connections may go unused.
#[derive(Clone, Copy, Debug)]
pub(in crate::frontend) struct Patience {
    /// Until the headers of the first request are complete.
    pub first: Duration,
    /// Without a request, after that.
    pub idle: Duration,
}

impl Patience {
    /// Resolves when an HTTP/2 connection that was made at `connected` goes unused for too long,
    /// and counts it. Others have their own clocks.
    pub(in crate::frontend) async fn runs_out(self, connected: Instant, requests: &Requests) {
        tokio::time::sleep_until(connected + self.first).await;
        if !requests.speak_http2() {
            return pending().await;
        }
        let mut opened = requests.streams_opened();
        if opened == 0 {
            return requests.run_out(Limit::HeaderTime);
        }
        let mut quiet = 0;
        while quiet < LOOKS {
            tokio::time::sleep(self.idle / LOOKS).await;
            let opened_before = std::mem::replace(&mut opened, requests.streams_opened());
            quiet = match opened == opened_before && requests.streams_open() == 0 {
                true => quiet + 1,
                false => 0,
            };
        }
        requests.run_out(Limit::IdleTime);
    }
}

/// Resolves when a client that was told to go away has had its time, and no request is left that
/// was on its way then.
pub(in crate::frontend) async fn farewell(requests: &Requests) {
    loop {
        tokio::time::sleep(FAREWELL).await;
        if requests.streams_open() == 0 {
            return;
        }
    }
}
