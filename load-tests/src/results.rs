//! `dormouse-load results`: the results page, from the JSON that measurements wrote.

mod document;
mod page;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::Value;

use self::document::Document;

/// The longest file of a recorded command.
const MOST_BYTES: u64 = 64 << 20;

/// Writes docs/results.md from load-tests/results/*.json.
///
/// The files are what any measurement writes with `--json FILE`; `results --record` runs one and
/// keeps its file. Every figure stands with its command, versions, machine and date.
#[derive(Args, Debug)]
pub(crate) struct ResultsArgs {
    /// Folder with the JSON files
    #[arg(long, value_name = "DIR", default_value = "load-tests/results")]
    folder: PathBuf,
    /// The page
    #[arg(long, value_name = "FILE", default_value = "docs/results.md")]
    page: PathBuf,
    /// Only see whether the page is what the files give
    #[arg(long, conflicts_with = "record")]
    check: bool,
    /// Run a measurement of this program and keep what it found under this name first, also when
    /// it missed a bar
    #[arg(long, value_name = "NAME", requires = "command")]
    record: Option<String>,
    /// The measurement to record, such as: -- wake --models bert-base
    #[arg(last = true, value_name = "COMMAND", requires = "record")]
    command: Vec<OsString>,
}

pub(crate) async fn run(args: ResultsArgs) -> Result<()> {
    let mut status = None;
    if let Some(name) = &args.record {
        ensure!(
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'),
            "'{name}': letters, digits and '-'"
        );
        let command = args.command.clone();
        let (document, ended) = tokio::task::spawn_blocking(move || record(&command)).await??;
        fs::create_dir_all(&args.folder)?;
        let text = serde_json::to_string_pretty(&document)? + "\n";
        fs::write(args.folder.join(format!("{name}.json")), text)?;
        status = Some(ended);
    }
    let page = generate(&args.folder)?;
    if args.check {
        return check(&args.page, &page);
    }
    if let Some(folder) = args.page.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(&args.page, page).with_context(|| format!("cannot write {}", args.page.display()))?;
    if let Some(status) = status.filter(|status| !status.success()) {
        bail!("recorded, but the command ended with {status}");
    }
    Ok(())
}

/// Runs this program; what it wrote, and how it ended.
fn record(command: &[OsString]) -> Result<(Value, ExitStatus)> {
    // Where it writes to is decided here.
    let command = match command {
        [words @ .., last] if last == "--json" => words,
        words => words,
    };
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("record.json");
    let status = Command::new(std::env::current_exe()?)
        .args(command)
        .arg("--json")
        .arg(&file)
        .stdin(Stdio::null())
        .status()?;
    // A measurement that missed a bar has measured all the same.
    let Ok(metadata) = fs::metadata(&file) else {
        bail!("the command ended with {status} and wrote nothing");
    };
    ensure!(metadata.len() <= MOST_BYTES, "it wrote too much");
    let text = fs::read_to_string(&file)?;
    Document::parse(&text).context("the command is not one whose results can be kept")?;
    let mut document: Value = serde_json::from_str(&text)?;
    let words = command.iter().map(|word| word.to_string_lossy().into());
    document["tool"]["command_line"] = std::iter::once(Value::from("dormouse-load"))
        .chain(words)
        .collect();
    Ok((document, status))
}

/// The page that a folder's files give.
fn generate(folder: &Path) -> Result<String> {
    let mut files: Vec<PathBuf> = match fs::read_dir(folder) {
        Ok(entries) => entries
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<_, _>>()?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error).with_context(|| format!("{}", folder.display())),
    };
    files.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "json")
    });
    files.sort_unstable();
    let mut documents = Vec::new();
    for path in files {
        let text = fs::read_to_string(&path)?;
        let document =
            Document::parse(&text).with_context(|| format!("cannot use {}", path.display()))?;
        let name = path.file_stem().context("a file has a name")?;
        documents.push((name.to_string_lossy().into_owned(), document));
    }
    Ok(page::page(&documents))
}

fn check(path: &Path, wanted: &str) -> Result<()> {
    let found =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    if found == wanted {
        return Ok(());
    }
    let mut lines = found.lines().zip(wanted.lines()).enumerate();
    match lines.find(|(_, (found, wanted))| found != wanted) {
        Some((index, (found, wanted))) => bail!(
            "{} is not what the files give: line {} is\n{found}\ninstead of\n{wanted}",
            path.display(),
            index + 1
        ),
        None => bail!(
            "{} is not what the files give: it has another length",
            path.display()
        ),
    }
}

/// A day, from seconds since 1970.
fn day(unix: u64) -> String {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(unix.min(1 << 37));
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.chars().take(10).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_is_what_the_files_give() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let page = generate(&here.join("results")).unwrap();
        check(&here.join("../docs/results.md"), &page).unwrap();
    }

    #[test]
    fn changed_page_is_told_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page.md");
        fs::write(&path, "a\nb\n").unwrap();
        check(&path, "a\nb\n").unwrap();
        let error = check(&path, "a\nc\n").unwrap_err().to_string();
        assert!(error.contains("line 2"), "{error}");
        assert!(check(&path, "a\nb\nc\n").is_err());
        assert!(check(&folder.path().join("absent"), "").is_err());
    }

    #[test]
    fn broken_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("x.json"), "{}").unwrap();
        fs::write(folder.path().join("notes.txt"), "ignored").unwrap();
        let error = format!("{:#}", generate(folder.path()).unwrap_err());
        assert!(error.contains("x.json"), "{error}");
    }

    #[test]
    fn days_are_those_of_the_calendar() {
        assert_eq!(day(0), "1970-01-01");
        assert_eq!(day(951_782_400), "2000-02-29");
    }
}
