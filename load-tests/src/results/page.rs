//! The page: sections, tables, and where each figure comes from.

use std::fmt::Write;

use serde_json::{Map, Value};

use super::day;
use super::document::Document;
use crate::compare::figures::Comparison;
use crate::compare::report::{self, Titled, number, spread};
use crate::drive::outcome::{Machine, Outcome, Tool};
use crate::samples::{Samples, mib};

const HEAD: &str = "\
# Results

Written by `dormouse-load results` from the JSON files in `load-tests/results`; do not edit. Every
section says what was run, where and when. Figures are medians with the smallest and the largest
value in parentheses. [load-tests/README.md](../load-tests/README.md) says how to repeat them.
";
const NONE: &str = "\nNothing is recorded yet.\n";
/// Lines of a table of figures whose form is not known ahead of time.
const MOST_ROWS: usize = 200;

/// All documents by name, as one page.
pub(crate) fn page(documents: &[(String, Document)]) -> String {
    let mut page = HEAD.to_owned();
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

fn section(name: &str, document: &Document) -> String {
    let mut text = format!("\n### {name}\n\n");
    text += &origin(document);
    let tables = match document {
        Document::Comparison(one) => {
            text += &participants(one);
            report::tables(one)
        }
        Document::Run(one) => vec![steps(one)],
        Document::Record(one) => anything("", &one.figures),
    };
    for table in &tables {
        text += &markdown(table);
    }
    text
}

/// Command, versions, machine and date.
fn origin(document: &Document) -> String {
    let Tool {
        version,
        optimised,
        command_line,
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
    let build = match optimised {
        true => "",
        false => ", **built without optimisations**",
    };
    format!(
        "`dormouse-load {}`, version {version}{build}, {} · {cpu}, {cores} cores, {:.0} GiB, Linux \
         {kernel}\n",
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
            process.map_or_else(|| "–".to_owned(), |one| number(one.micros_per_request)),
            process.map_or_else(|| "–".to_owned(), |one| number(mib(one.resident_bytes))),
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

/// Tables of figures whose form is their command's own business.
fn anything(title: &str, value: &Value) -> Vec<Titled> {
    match value {
        Value::Array(items) if items.iter().all(Value::is_object) && !items.is_empty() => {
            vec![list(title, items)]
        }
        Value::Object(map) => {
            let mut tables = Vec::new();
            let mut single = Map::new();
            for (key, value) in map {
                match value {
                    Value::Array(items) if items.iter().any(Value::is_object) => {
                        tables.extend(anything(key, value));
                    }
                    value => {
                        single.insert(key.clone(), value.clone());
                    }
                }
            }
            if !single.is_empty() {
                let rows = flat(&single).into_iter();
                let figures = Titled {
                    title: title.to_owned(),
                    header: vec!["measure".to_owned(), "value".to_owned()],
                    rows: rows.map(|(key, value)| vec![key, value]).collect(),
                };
                tables.insert(0, figures);
            }
            tables
        }
        _ => Vec::new(),
    }
}

fn list(title: &str, items: &[Value]) -> Titled {
    let rows: Vec<Vec<(String, String)>> = items
        .iter()
        .take(MOST_ROWS)
        .filter_map(Value::as_object)
        .map(flat)
        .collect();
    let mut header: Vec<String> = Vec::new();
    for (key, _) in rows.iter().flatten() {
        if !header.contains(key) {
            header.push(key.clone());
        }
    }
    let rows = rows.iter().map(|row| {
        let cell = |column: &String| {
            let found = row.iter().find(|(key, _)| key == column);
            found.map_or_else(|| "–".to_owned(), |(_, value)| value.clone())
        };
        header.iter().map(cell).collect()
    });
    Titled {
        title: title.to_owned(),
        rows: rows.collect(),
        header: header.clone(),
    }
}

/// Keys and values of a map and of the maps in it.
fn flat(map: &Map<String, Value>) -> Vec<(String, String)> {
    let mut flattened = Vec::new();
    for (key, value) in map {
        let words = match value {
            Value::Object(inner) => match serde_json::from_value::<Samples>(value.clone()) {
                Ok(samples) => spread(&samples),
                Err(_) => {
                    let inner = flat(inner).into_iter();
                    flattened.extend(inner.map(|(k, v)| (format!("{key}: {k}"), v)));
                    continue;
                }
            },
            Value::Number(value) => match (value.as_u64(), value.as_f64()) {
                (Some(whole), _) => whole.to_string(),
                (None, Some(value)) => number(value),
                (None, None) => continue,
            },
            Value::String(text) => text.clone(),
            Value::Bool(true) => "yes".to_owned(),
            Value::Bool(false) => "no".to_owned(),
            Value::Null => "–".to_owned(),
            Value::Array(items) => match items.iter().map(Value::as_str).collect() {
                Some(words) => {
                    let words: Vec<&str> = words;
                    words.join("; ")
                }
                None => format!("{} values", items.len()),
            },
        };
        flattened.push((key.replace('_', " "), words));
    }
    flattened
}

fn markdown(table: &Titled) -> String {
    let mut text = String::new();
    if !table.title.is_empty() {
        text += &format!("\n{}\n", table.title);
    }
    let line = |cells: &[String]| {
        let cells: Vec<String> = cells.iter().map(|cell| escaped(cell)).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    text.push('\n');
    text += &line(&table.header);
    // Writing to a string cannot fail.
    let _ = writeln!(text, "|{}", "---|".repeat(table.header.len()));
    for row in &table.rows {
        text += &line(row);
    }
    text
}

fn escaped(cell: &str) -> String {
    cell.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests;
