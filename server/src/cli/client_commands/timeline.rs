//! `dormouse models --timeline`: a model's latest cold starts as waterfalls.

use std::fmt::Write as _;

use dormouse_client::{Client, VersionColdStarts};
use serde_json::{Value, json};

use super::{Reply, explain};
use crate::cli::output::{self, Screen};
use crate::cli::waterfall::{PARKED, answered, cold_start_json};

pub(super) async fn timeline(
    client: &Client,
    (model, version): (&str, &str),
    last: usize,
    screen: &Screen,
) -> anyhow::Result<Reply> {
    let versions = client.cold_starts(model, version).await;
    let doing = "cannot read the cold starts";
    let mut versions = versions.map_err(|error| explain(client, error, doing))?;
    for version in &mut versions {
        let older = version.cold_starts.len().saturating_sub(last);
        version.cold_starts.drain(..older);
    }
    Ok(Reply::good(if screen.is_json() {
        timeline_json(&versions)
    } else {
        timeline_text(&versions, screen)
    }))
}

fn timeline_json(versions: &[VersionColdStarts]) -> String {
    let version = |version: &VersionColdStarts| {
        json!({
            "name": version.model,
            "version": version.version,
            "cold_starts": version.cold_starts.iter().map(cold_start_json).collect::<Value>(),
        })
    };
    output::json(&versions.iter().map(version).collect::<Value>())
}

fn timeline_text(versions: &[VersionColdStarts], screen: &Screen) -> String {
    let mut text = String::new();
    for version in versions {
        let name = format!("{} version {}", version.model, version.version);
        // Writing to a string cannot fail.
        if version.cold_starts.is_empty() {
            let _ = match version.has_run {
                false => writeln!(text, "{name} has not been woken since its server started"),
                true => writeln!(
                    text,
                    "{name} has run, but its server tells of no cold start"
                ),
            };
        }
        for cold in &version.cold_starts {
            if !text.is_empty() {
                text.push('\n');
            }
            let from = match cold.kind.as_str() {
                "source" => " from its repository",
                "prepared" => " from the prepared store",
                "parked" => " from its parked session",
                _ => "",
            };
            let loaded = output::duration(cold.total);
            let answered = answered(cold).map(output::duration);
            let _ = write!(text, "{name} woke{from}");
            let _ = match (cold.kind == PARKED, answered) {
                (true, Some(answered)) => write!(text, ", first run done after {answered}"),
                (true, None) => Ok(()),
                (false, Some(answered)) => {
                    write!(
                        text,
                        ", loaded in {loaded}, first run done after {answered}"
                    )
                }
                (false, None) => write!(text, ", loaded in {loaded}"),
            };
            if let Some(started) = cold.started {
                let _ = write!(text, ", at {}", humantime::format_rfc3339_seconds(started));
            }
            if cold.ahead {
                text.push_str(", ahead of any request");
            }
            text.push('\n');
            text.push_str(&screen.waterfall(cold));
            if !cold.overlap.is_zero() {
                let saved = output::duration(cold.overlap);
                let _ = writeln!(text, "  doing stages side by side saved {saved}");
            }
        }
    }
    text
}
