//! The page: sections, tables, and where each figure comes from.

use super::day;
use super::document::Document;
use crate::bars::{self, Bar, BarKind};
use crate::compare::figures::Comparison;
use crate::compare::report;
use crate::drive::outcome::{Machine, Outcome, Tool};
use crate::samples::mib;
use crate::table::{Titled, maybe, number};

const HEAD: &str = "\
# Results

Written by `dormouse-load results` from the JSON files in `load-tests/results`; do not edit. Every
section says what was run, where and when. Figures are medians with the smallest and the largest
value in parentheses; a single value was measured once. Client and server share the machine.
[load-tests/README.md](../load-tests/README.md) says how to repeat them.
";
const NONE: &str = "\nNothing is recorded yet.\n";

/// All documents by name, as one page.
pub(crate) fn page(documents: &[(String, Document)]) -> String {
    let mut page = HEAD.to_owned();
    page += &judged(documents);
    let (simulated, measured): (Vec<_>, Vec<_>) =
        documents.iter().partition(|(_, one)| one.is_simulated());
    for (title, words, documents) in [
        (
            "Measured",
            "On real servers and real models, by the clock.",
            measured,
        ),
        (
            "Simulated",
            "By the server's own decisions in virtual time; no model was run.",
            simulated,
        ),
    ] {
        page += &format!("\n## {title}\n\n{words}\n");
        if documents.is_empty() {
            page += NONE;
        }
        for (name, document) in documents {
            page += &section(name, document);
        }
    }
    page
}

/// How many bars were met, and all that were not.
fn judged(documents: &[(String, Document)]) -> String {
    let (mut counts, mut missed) = (Vec::new(), Vec::new());
    for (name, document) in documents {
        let bars = document.bars();
        if bars.is_empty() {
            continue;
        }
        let count = |is: &dyn Fn(&Bar) -> bool| bars.iter().filter(|bar| is(bar)).count();
        let promised = |bar: &Bar, met| bar.kind != BarKind::Aim && bar.met == met;
        let aims = count(&|bar| bar.kind == BarKind::Aim);
        let aims_met = count(&|bar| bar.kind == BarKind::Aim && bar.met == Some(true));
        counts.push(vec![
            format!("[{name}](#{name})"),
            count(&|bar| promised(bar, Some(true))).to_string(),
            count(&|bar| promised(bar, Some(false))).to_string(),
            count(&|bar| promised(bar, None)).to_string(),
            match aims {
                0 => "–".to_owned(),
                aims => format!("{aims_met} of {aims}"),
            },
        ]);
        let of_document = bars.iter().filter(|bar| promised(bar, Some(false)));
        missed.extend(of_document.map(|bar| {
            vec![
                name.clone(),
                bar.name.clone(),
                bar.wanted.clone(),
                bar.found.clone(),
            ]
        }));
    }
    if counts.is_empty() {
        return String::new();
    }
    let mut text =
        "\n## Bars\n\nWhat is promised, and whether it was kept. An aim is not a promise.\n"
            .to_owned();
    let header = ["measurement", "met", "missed", "not judged", "aims met"];
    text += &Titled::new("", &header, counts).markdown();
    text += &match missed.is_empty() {
        true => "\nNone was missed.\n".to_owned(),
        false => {
            let header = ["measurement", "bar", "wanted", "found"];
            Titled::new("Missed", &header, missed).markdown()
        }
    };
    text
}

fn section(name: &str, document: &Document) -> String {
    let mut text = format!("\n### {name}\n\n");
    text += &origin(document);
    let mut notes = Vec::new();
    let tables = match document {
        Document::Comparison(one) => {
            text += &participants(one);
            report::tables(one)
        }
        Document::Run(one) => vec![steps(one)],
        Document::Record(one) => {
            text += &format!("\n{}\n", one.figures.about());
            notes = one.figures.notes();
            one.figures.tables()
        }
    };
    for table in tables.iter().chain(&bars::table(document.bars())) {
        text += &table.markdown();
    }
    for note in notes {
        text += &format!("\n{note}\n");
    }
    text
}

/// Command, versions, machine and date.
fn origin(document: &Document) -> String {
    let Tool {
        version,
        optimised,
        command_line,
        commit,
        onnxruntime,
        ..
    } = document.tool();
    let Machine {
        cpu,
        cores,
        memory_bytes,
        kernel,
    } = document.machine();
    let words = command_line.iter().skip(1);
    let command: Vec<&str> = words.map(String::as_str).collect();
    let mut versions = format!("version {version}");
    if let Some(commit) = commit {
        versions += &format!(" at {commit}");
    }
    if !optimised {
        versions += ", **built without optimisations**";
    }
    if let Some(onnxruntime) = onnxruntime {
        versions += &format!(", ONNX Runtime {onnxruntime}");
    }
    format!(
        "`dormouse-load {}`, {versions}, {} · {cpu}, {cores} cores, {:.0} GiB, Linux {kernel}\n",
        command.join(" "),
        day(document.started_unix()),
        mib(*memory_bytes) / 1024.0
    )
}

fn participants(found: &Comparison) -> String {
    let plan = &found.plan;
    let mut text = format!(
        "\n{} rounds, {} per measurement after {} of warm-up, {} threads per operator{}. Client and \
         servers share the machine.\n\n",
        plan.repetitions,
        humantime::format_duration(plan.duration),
        humantime::format_duration(plan.warmup),
        plan.thread_count(),
        match found.side_by_side {
            true => ", all servers running at once",
            false => "",
        }
    );
    for server in &found.servers {
        let versions = match server.versions.is_empty() {
            true => String::new(),
            false => format!(" ({})", server.versions.join(", ")),
        };
        text += &format!(
            "- **{}**: {}{versions}. {}\n",
            server.name, server.title, server.notes
        );
    }
    for absent in &found.absent {
        let reason = absent.reason.lines().next().unwrap_or_default();
        text += &format!(
            "- **{}** did not take part ({:?}): {reason}\n",
            absent.server, absent.part
        );
    }
    text
}

fn steps(run: &Outcome) -> Titled {
    let rows = run.steps.iter().map(|step| {
        let all = &step.all;
        let process = step.process.as_ref();
        vec![
            step.label.clone(),
            number(all.throughput),
            number(all.latency.p50),
            number(all.latency.p99),
            number(all.latency.max),
            maybe(process.map(|one| one.micros_per_request)),
            maybe(process.map(|one| mib(one.resident_bytes))),
            all.failed().to_string(),
            all.cold.to_string(),
        ]
    });
    Titled {
        title: format!(
            "{} on {} {}",
            run.scenario.name, run.server.name, run.server.version
        ),
        header: [
            "step",
            "answers/s",
            "p50 ms",
            "p99 ms",
            "max ms",
            "CPU µs/request",
            "RSS MiB",
            "failed",
            "cold",
        ]
        .map(str::to_owned)
        .to_vec(),
        rows: rows.collect(),
    }
}

#[cfg(test)]
mod tests;
