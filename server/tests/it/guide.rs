//! The user guide: every command in it is run, what it shows is compared with what it says, and
//! every error message it explains is one the code has.
//!
//! A page's `console` blocks are one session of a shell, in a folder of its own with the checked-in
//! models where a checkout has them. `$ ` begins a command, `> ` goes on with it; the lines below
//! it must be found in its output in this order, `…` standing for anything. A server in the
//! background is waited for until it is ready, and has ports of its own for the usual ones. Pages
//! that the guide leads to, and that have commands, are walked like its own.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;
use tokio::process::Command;

use crate::foreign::prepare;
use crate::python_client::{PACKAGES, client_folder};
use crate::server::{PATIENCE, engine_installed, target_dir};

/// The usual ports, and the variable that gives the server another. The last is somebody else's.
const PORTS: [(&str, Option<&str>); 4] = [
    ("8000", Some("DORMOUSE_HTTP_PORT")),
    ("8001", Some("DORMOUSE_GRPC_PORT")),
    ("8002", Some("DORMOUSE_METRICS_PORT")),
    ("8080", None),
];

/// Pages with commands; those with a folder lie beside the guide's.
const WALKED: [&str; 6] = [
    "quick-start.md",
    "from-triton.md",
    "operations.md",
    "troubleshooting.md",
    "../security.md",
    "../repositories.md",
];

fn guide() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide")
}

fn page(name: &str) -> Result<String> {
    let path = guide().join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// One command of a page and what it is said to show.
#[derive(Debug)]
struct Step {
    line: usize,
    command: String,
    shows: Vec<String>,
}

/// The commands of a page; other fenced blocks may hold no commands of a shell.
fn steps(text: &str) -> Result<Vec<Step>> {
    let mut steps: Vec<Step> = Vec::new();
    let mut block = None;
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        if let Some(kind) = line.strip_prefix("```") {
            block = block.is_none().then(|| kind.to_owned());
            ensure!(
                !matches!(block.as_deref(), Some("sh" | "bash" | "shell")),
                "line {number}: commands are written as console blocks, which are run"
            );
            continue;
        }
        if block.as_deref() != Some("console") {
            continue;
        }
        let more = line.strip_prefix("> ").or((line == ">").then_some(""));
        match (line.strip_prefix("$ "), more) {
            (Some(command), _) => steps.push(Step {
                line: number,
                command: command.to_owned(),
                shows: Vec::new(),
            }),
            (None, Some(more)) => {
                let step = steps.last_mut().context("a command goes on before any")?;
                step.command.push('\n');
                step.command.push_str(more);
            }
            (None, None) => {
                let step = steps.last_mut().context("output before any command")?;
                step.shows.push(line.trim().to_owned());
            }
        }
    }
    Ok(steps)
}

/// Whether a line is what is shown of it, `…` standing for anything and blanks for any number.
fn matches(found: &str, shown: &str) -> bool {
    let blanks = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (found, shown) = (blanks(found), blanks(shown));
    let mut parts = shown.split('…').map(str::trim);
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = found.strip_prefix(first) else {
        return false;
    };
    for part in parts {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    shown.ends_with('…') || rest.trim().is_empty()
}

/// Ports that nobody listens on. They are below those that the system chooses from for whoever
/// asks for any, where it leaves some: so they are free still when a server of the page starts.
fn free_ports(count: usize) -> Result<Vec<u16>> {
    const LOWEST: u32 = 10_000;
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    let chosen_from = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
    let first = chosen_from.split_whitespace().next().unwrap_or_default();
    let room = first.parse::<u32>()?.saturating_sub(LOWEST);
    // Other processes of tests begin elsewhere.
    let start = std::process::id().wrapping_mul(97);
    let mut free = Vec::new();
    while free.len() < count {
        let taken = TAKEN.fetch_add(1, Ordering::Relaxed);
        ensure!(taken < 10_000, "no port is free");
        let port = match room {
            0..1000 => 0,
            room => LOWEST + start.wrapping_add(taken) % room,
        };
        free.extend(TcpListener::bind(("127.0.0.1", u16::try_from(port)?)));
    }
    let port = |listener: &TcpListener| Ok(listener.local_addr()?.port());
    free.iter().map(port).collect()
}

/// A shell's folder, its ports and the script that runs a page in it.
struct Session {
    folder: TempDir,
    ports: Vec<u16>,
}

impl Session {
    fn new() -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("dormouse-guide-")
            .tempdir()?;
        fs::create_dir_all(folder.path().join("server/tests"))?;
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
        symlink(models, folder.path().join("server/tests/models"))?;
        let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        symlink(configs, folder.path().join("configs"))?;
        let ports = free_ports(PORTS.len())?;
        Ok(Self { folder, ports })
    }

    /// Where a command's output goes.
    fn output(&self, index: usize) -> PathBuf {
        self.folder.path().join(format!(".output-{index}"))
    }

    fn script(&self, steps: &[Step]) -> String {
        let mut script = String::from("set -u\ntrap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n");
        for (index, step) in steps.iter().enumerate() {
            let mut command = step.command.clone();
            for ((usual, _), port) in PORTS.iter().zip(&self.ports) {
                command =
                    command.replace(&format!("localhost:{usual}"), &format!("127.0.0.1:{port}"));
            }
            // Python's web server takes its port as a word.
            let web = format!(" {}", self.ports[PORTS.len() - 1]);
            command = command.replace(" 8080", &web);
            let output = self.output(index).display().to_string();
            let background = command.trim_end().ends_with('&');
            script.push_str(&format!("{{ {command}\n}} >{output} 2>&1\n"));
            script.push_str(&format!("echo $? >{output}.code\n"));
            if background && command.contains("dormouse serve") {
                script.push_str(
                    "for _ in $(seq 600); do dormouse health >/dev/null 2>&1 && break; sleep 0.1; done\n",
                );
            }
        }
        script
    }

    async fn run(&self, steps: &[Step]) -> Result<()> {
        let environment = prepare(PACKAGES).await?;
        let binary = Path::new(env!("CARGO_BIN_EXE_dormouse"));
        let path = format!(
            "{}:{}:{}",
            binary.parent().context("a folder")?.display(),
            environment.root().join("bin").display(),
            std::env::var("PATH").unwrap_or_default()
        );
        let mut shell = Command::new("bash");
        shell
            .arg("-c")
            .arg(self.script(steps))
            .current_dir(self.folder.path())
            .env("PATH", path)
            .env("PYTHONPATH", fs::canonicalize(client_folder())?.join("src"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("DORMOUSE_CACHE_DIR", target_dir().join("dormouse-cache"))
            .env("DORMOUSE_STORE", self.folder.path().join("store"))
            .env(
                "DORMOUSE_REPOSITORY_CACHE",
                self.folder.path().join("fetched"),
            )
            .env(
                "DORMOUSE_URL",
                format!("http://127.0.0.1:{}", self.ports[1]),
            )
            .env("DORMOUSE_HTTP_ADDRESS", "127.0.0.1")
            .env("DORMOUSE_GRPC_ADDRESS", "127.0.0.1")
            .stdin(Stdio::null())
            .kill_on_drop(true);
        for ((_, variable), port) in PORTS.iter().zip(&self.ports) {
            if let Some(variable) = variable {
                shell.env(variable, port.to_string());
            }
        }
        // A page has many commands.
        tokio::time::timeout(PATIENCE * 5, shell.status())
            .await
            .context("the page's commands do not end")??;
        Ok(())
    }

    /// What a command showed, and how it ended.
    fn shown(&self, index: usize) -> Result<(String, String)> {
        let output = self.output(index);
        let code = fs::read_to_string(format!("{}.code", output.display()))
            .context("the command was not reached or did not end")?;
        let text = String::from_utf8_lossy(&fs::read(&output)?).into_owned();
        Ok((text, code.trim().to_owned()))
    }
}

/// Runs the commands of a page and compares what they show.
async fn walk(name: &str) -> Result<()> {
    engine_installed().await?;
    let steps = steps(&page(name)?)?;
    ensure!(!steps.is_empty(), "{name} has no commands");
    let session = Session::new()?;
    session.run(&steps).await?;
    for (index, step) in steps.iter().enumerate() {
        let place = format!("docs/guide/{name}:{}: {}", step.line, step.command);
        let (text, code) = session.shown(index).context(place.clone())?;
        // A command that is meant to fail says so in what it shows.
        let fails = step
            .shows
            .iter()
            .any(|line| line.starts_with("error: ") || line.starts_with("{\"error\""));
        ensure!(
            fails == (code != "0") || step.command.starts_with("curl"),
            "{place}\nended with {code}:\n{text}"
        );
        let mut lines = text.lines();
        for shown in &step.shows {
            ensure!(
                lines.any(|line| matches(line, shown)),
                "{place}\ndid not show {shown:?} (any more), but\n{text}"
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn the_quick_start_works_as_it_is_written() -> Result<()> {
    walk("quick-start.md").await
}

#[tokio::test]
async fn the_way_from_triton_works_as_it_is_written() -> Result<()> {
    walk("from-triton.md").await
}

#[tokio::test]
async fn operations_work_as_they_are_written() -> Result<()> {
    walk("operations.md").await
}

#[tokio::test]
async fn troubles_are_as_they_are_written() -> Result<()> {
    walk("troubleshooting.md").await
}

#[tokio::test]
async fn security_is_set_up_as_it_is_written() -> Result<()> {
    walk("../security.md").await
}

#[tokio::test]
async fn a_repository_on_a_web_server_works_as_it_is_written() -> Result<()> {
    walk("../repositories.md").await
}

#[test]
fn every_page_of_the_guide_is_walked_or_generated() -> Result<()> {
    let contents = page("README.md")?;
    for name in WALKED {
        ensure!(
            contents.contains(&format!("({name})")),
            "README.md does not lead to {name}"
        );
    }
    for entry in fs::read_dir(guide())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name != "README.md" {
            ensure!(
                contents.contains(&format!("({name})")),
                "README.md does not lead to {name}"
            );
        }
        if !WALKED.contains(&name.as_str()) {
            ensure!(
                steps(&page(&name)?)?.is_empty(),
                "nobody runs the commands of {name}"
            );
        }
    }
    Ok(())
}

/// Headings in code spans are the messages; `…` stands for what differs.
#[test]
fn every_message_that_is_explained_is_one_the_code_has() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut literals = Vec::new();
    for folder in [
        "src",
        "core/src",
        "../model-store/src",
        "../clients/rust/src",
    ] {
        collect_literals(&root.join(folder), &mut literals)?;
    }
    let text = page("troubleshooting.md")?;
    let messages: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("### `")?.strip_suffix('`'))
        .collect();
    ensure!(
        messages.len() >= 15,
        "only {} messages are explained",
        messages.len()
    );
    let missing: Vec<_> = messages
        .iter()
        .filter(|message| {
            let parts: Vec<_> = message.split('…').map(str::trim).collect();
            !literals.iter().any(|literal| holds(literal, &parts))
        })
        .collect();
    if !missing.is_empty() {
        bail!("no string of the code has {missing:#?}");
    }
    Ok(())
}

/// Whether a literal has these parts in this order.
fn holds(literal: &str, parts: &[&str]) -> bool {
    let mut rest = literal;
    parts.iter().all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}

/// The string literals of the Rust files below a folder, tests left out.
fn collect_literals(folder: &Path, literals: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect_literals(&path, literals)?;
        } else if path.extension().is_some_and(|kind| kind == "rs") && !path.ends_with("tests.rs") {
            literals_of(&fs::read_to_string(&path)?, literals);
        }
    }
    Ok(())
}

fn literals_of(source: &str, literals: &mut Vec<String>) {
    let code = match source.find("#[cfg(test)]\nmod tests {") {
        Some(tests) => &source[..tests],
        None => source,
    };
    let mut rest = code;
    while let Some(next) = rest.chars().next() {
        let after = &rest[next.len_utf8()..];
        rest = match next {
            '/' if after.starts_with('/') => after.find('\n').map_or("", |end| &after[end..]),
            '\'' => past_character(after),
            '"' => read_literal(after, literals),
            'r' if raw_start(after).is_some() => {
                let hashes = raw_start(after).unwrap_or_default();
                let content = &after[hashes + 1..];
                let end = content.find(&format!("\"{}", "#".repeat(hashes)));
                let end = end.unwrap_or(content.len());
                literals.push(content[..end].to_owned());
                content.get(end + 1 + hashes..).unwrap_or_default()
            }
            _ => after,
        };
    }
}

/// How many hashes there are before a raw string's quote.
fn raw_start(after: &str) -> Option<usize> {
    let hashes = after.bytes().take_while(|byte| *byte == b'#').count();
    after[hashes..].starts_with('"').then_some(hashes)
}

/// What follows a character or the quote of a lifetime.
fn past_character(after: &str) -> &str {
    let mut characters = after.chars();
    match (characters.next(), characters.next()) {
        (Some('\\'), _) => after[2..]
            .find('\'')
            .map_or("", |end| &after[2 + end + 1..]),
        (Some(_), Some('\'')) => characters.as_str(),
        _ => after,
    }
}

/// Reads a string up to its end and returns what follows.
fn read_literal<'a>(after: &'a str, literals: &mut Vec<String>) -> &'a str {
    let mut literal = String::new();
    let mut characters = after.chars();
    while let Some(character) = characters.next() {
        match character {
            '"' => break,
            '\\' => match characters.next() {
                // A line that goes on: the break and the indentation are not part of it.
                Some('\n') => {
                    let indented = characters.as_str();
                    characters = indented.trim_start().chars();
                }
                Some(escaped) => literal.push(escaped),
                None => break,
            },
            _ => literal.push(character),
        }
    }
    literals.push(literal);
    characters.as_str()
}
