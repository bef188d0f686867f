//! `dormouse store`: what is prepared on this machine. Works beside running servers.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use dormouse_core::id::ByteSize;
use dormouse_model_store::store::{
    EntryInfo, GcReport, PackingVerdict, Store, StoreConfig, VerifyReport,
};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::output::{self, FormatArgs, Screen};
use crate::assets;

/// What is done with the store of prepared models.
#[derive(Debug, clap::Subcommand)]
pub enum StoreCommand {
    /// List the prepared models, last used first
    Ls(LsArgs),
    /// Compare everything in the store with its digest; fails when something is damaged
    Verify(VerifyArgs),
    /// Remove what was used longest ago, and what nobody uses
    Gc(GcArgs),
}

/// Which store, and how to show it.
#[derive(Clone, Debug, clap::Args)]
pub struct StoreArgs {
    /// The store's folder [default: `store` in Dormouse's cache folder]
    #[arg(long, value_name = "DIR", env = "DORMOUSE_STORE")]
    pub store: Option<PathBuf>,
    #[command(flatten)]
    pub format: FormatArgs,
}

/// List the prepared models.
#[derive(Debug, clap::Args)]
pub struct LsArgs {
    #[command(flatten)]
    pub store: StoreArgs,
}

/// Compare everything in the store with its digest.
#[derive(Debug, clap::Args)]
pub struct VerifyArgs {
    /// Remove what is damaged: it is prepared again when it is needed
    #[arg(long)]
    pub repair: bool,
    #[command(flatten)]
    pub store: StoreArgs,
}

/// Remove what was used longest ago, and what nobody uses.
#[derive(Debug, clap::Args)]
pub struct GcArgs {
    /// How much may stay, as in 20GiB; what is in use stays in any case
    #[arg(long, value_name = "SIZE", default_value = "20GiB")]
    pub max_size: ByteSize,
    #[command(flatten)]
    pub store: StoreArgs,
}

/// What a command has to say.
#[derive(Debug)]
struct Reply {
    text: String,
    good: bool,
}

/// Runs a command and prints its result; the exit code is 1 when there is damage that stays.
pub async fn run(command: StoreCommand) -> anyhow::Result<u8> {
    let reply = tokio::task::spawn_blocking(move || execute(&command)).await??;
    output::print(&reply.text).context("cannot write the result")?;
    Ok(u8::from(!reply.good))
}

/// Where prepared models are kept unless the user says otherwise.
pub fn default_folder() -> Result<PathBuf, assets::InstallError> {
    Ok(assets::cache_folder()?.join("store"))
}

fn execute(command: &StoreCommand) -> anyhow::Result<Reply> {
    let arguments = match command {
        StoreCommand::Ls(arguments) => &arguments.store,
        StoreCommand::Verify(arguments) => &arguments.store,
        StoreCommand::Gc(arguments) => &arguments.store,
    };
    let screen = Screen::of_stdout(arguments.format.chosen());
    let dir = match &arguments.store {
        Some(dir) => dir.clone(),
        None => default_folder()?,
    };
    let store = Store::open_existing(StoreConfig {
        dir: dir.clone(),
        max_bytes: StoreConfig::DEFAULT_MAX_BYTES,
    })?;
    match command {
        StoreCommand::Ls(_) => list(store.as_ref(), &dir, &screen),
        StoreCommand::Verify(arguments) => {
            let Some(store) = &store else {
                bail!(
                    "{} is not a store: nothing was ever prepared there",
                    dir.display()
                );
            };
            verify(store, arguments.repair, &screen)
        }
        StoreCommand::Gc(arguments) => gc(store.as_ref(), arguments.max_size, &screen),
    }
}

fn list(store: Option<&Arc<Store>>, dir: &Path, screen: &Screen) -> anyhow::Result<Reply> {
    let (entries, total) = match store {
        Some(store) => (store.list()?, store.bytes_on_disk()?),
        None => (Vec::new(), 0),
    };
    let text = if screen.is_json() {
        list_json(&entries, total, dir)
    } else {
        list_table(&entries, total, dir, screen)
    };
    Ok(Reply { text, good: true })
}

fn list_json(entries: &[EntryInfo], total: u64, dir: &Path) -> String {
    let entry = |entry: &EntryInfo| {
        json!({
            "key": entry.key.to_string(),
            "models": entry.facts.models,
            "graph_bytes": entry.graph_bytes,
            "own_bytes": entry.own_bytes,
            "shared_bytes": entry.shared_bytes,
            "source_bytes": entry.facts.source_bytes,
            "created": unix_seconds(entry.facts.created_at()),
            "last_used": unix_seconds(entry.last_used),
            "packing": entry.facts.packing.map(|verdict| json!({
                "pays": verdict.pays,
                "unpacked_run_us": verdict.unpacked_run_us,
                "packed_run_us": verdict.packed_run_us,
                "packed_private_bytes": verdict.packed_private_bytes,
            })),
        })
    };
    output::json(&json!({
        "store": dir.display().to_string(),
        "bytes": total,
        "entries": entries.iter().map(entry).collect::<Vec<Value>>(),
    }))
}

fn list_table(entries: &[EntryInfo], total: u64, dir: &Path, screen: &Screen) -> String {
    if entries.is_empty() {
        return format!("nothing is prepared in {}\n", dir.display());
    }
    let headings = [
        "model",
        "version",
        "key",
        "graph",
        "own",
        "shared",
        "last used",
        "packing",
    ];
    let mut table = screen.table(&headings);
    let now = SystemTime::now();
    for entry in entries {
        let models = entry.facts.models.iter();
        let (names, versions): (Vec<_>, Vec<_>) = models.map(|label| parts(label)).unzip();
        table.add_row([
            or_dash(names.join("\n")),
            or_dash(versions.join("\n")),
            entry.key.short(),
            ByteSize(entry.graph_bytes).to_string(),
            ByteSize(entry.own_bytes).to_string(),
            ByteSize(entry.shared_bytes).to_string(),
            ago(now.duration_since(entry.last_used).unwrap_or_default()),
            entry.facts.packing.as_ref().map_or("-".to_owned(), verdict),
        ]);
    }
    let mut text = output::lines(&table);
    let count = entries.len();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{count} prepared, {} in {}",
        ByteSize(total),
        dir.display()
    );
    text
}

/// The name and the version in what a prepared model is called, `bert/1`.
fn parts(label: &str) -> (&str, &str) {
    label.rsplit_once('/').unwrap_or((label, "-"))
}

fn or_dash(text: String) -> String {
    match text.is_empty() {
        true => "-".to_owned(),
        false => text,
    }
}

/// What was measured: whether packed weights are worth their memory.
fn verdict(verdict: &PackingVerdict) -> String {
    let [unpacked, packed] = [verdict.unpacked_run_us, verdict.packed_run_us]
        .map(|run| output::duration(Duration::from_micros(run)));
    let word = if verdict.pays { "pays" } else { "does not pay" };
    format!("{word} ({unpacked} to {packed})")
}

/// The largest unit is enough: nobody wants the seconds of a day ago.
fn ago(since: Duration) -> String {
    let seconds = since.as_secs();
    let (count, unit) = match seconds {
        0..60 => return "just now".to_owned(),
        60..3600 => (seconds / 60, "min"),
        3600..86_400 => (seconds / 3600, "h"),
        _ => (seconds / 86_400, "d"),
    };
    format!("{count} {unit} ago")
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

fn verify(store: &Store, repair: bool, screen: &Screen) -> anyhow::Result<Reply> {
    let bar = bar();
    let progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let report = store.verify(repair, &progress);
    bar.finish_and_clear();
    let report = report?;
    Ok(Reply {
        good: repair || report.damaged.is_empty(),
        text: if screen.is_json() {
            verify_json(&report, repair)
        } else {
            verify_text(&report, repair)
        },
    })
}

fn verify_json(report: &VerifyReport, repair: bool) -> String {
    let damaged = report.damaged.iter().map(|damage| {
        json!({
            "path": damage.path.display().to_string(),
            "reason": damage.reason,
            "models": damage.models,
        })
    });
    output::json(&json!({
        "entries": report.entries,
        "packs": report.packs,
        "bytes": report.bytes,
        "damaged": damaged.collect::<Vec<Value>>(),
        "repaired": repair && !report.damaged.is_empty(),
    }))
}

fn verify_text(report: &VerifyReport, repair: bool) -> String {
    let mut text = String::new();
    for damage in &report.damaged {
        let models = match &damage.models[..] {
            [] => String::new(),
            models => format!(" ({})", models.join(", ")),
        };
        let _ = writeln!(
            text,
            "damaged: {}{models}: {}",
            damage.path.display(),
            damage.reason
        );
    }
    let entries = counted(report.entries, "prepared model");
    let packs = counted(report.packs, "pack");
    let bytes = ByteSize(report.bytes);
    let _ = writeln!(text, "{entries} and {packs} checked, {bytes}");
    let _ = match (report.damaged.len(), repair) {
        (0, _) => writeln!(text, "all is well"),
        (count, true) => writeln!(
            text,
            "{count} damaged and removed: they are prepared again when they are needed"
        ),
        (count, false) => writeln!(text, "{count} damaged: --repair removes them"),
    };
    text
}

fn counted(count: usize, what: &str) -> String {
    let ending = if count == 1 { "" } else { "s" };
    format!("{count} {what}{ending}")
}

fn bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(
        "verifying [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
    )
    .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style.progress_chars("=> "))
}

fn gc(store: Option<&Arc<Store>>, max: ByteSize, screen: &Screen) -> anyhow::Result<Reply> {
    let report = match store {
        Some(store) => store.gc(max.0)?,
        None => GcReport::default(),
    };
    let text = if screen.is_json() {
        gc_json(&report)
    } else {
        gc_text(&report, max)
    };
    Ok(Reply { text, good: true })
}

fn gc_json(report: &GcReport) -> String {
    let removed = report
        .removed
        .iter()
        .map(|(key, models)| json!({ "key": key.to_string(), "models": models }));
    output::json(&json!({
        "removed": removed.collect::<Vec<Value>>(),
        "packs_removed": report.packs_removed,
        "freed_bytes": report.freed_bytes,
        "kept_bytes": report.kept_bytes,
    }))
}

fn gc_text(report: &GcReport, max: ByteSize) -> String {
    let mut text = String::new();
    for (key, models) in &report.removed {
        let _ = writeln!(text, "removed: {} {}", key.short(), models.join(", "));
    }
    let (freed, kept) = (ByteSize(report.freed_bytes), ByteSize(report.kept_bytes));
    let _ = writeln!(text, "{freed} freed, {kept} kept");
    if report.kept_bytes > max.0 {
        let _ = writeln!(
            text,
            "that is more than {max}: the rest is in use or was used within the last minute"
        );
    }
    text
}

#[cfg(test)]
mod tests;
