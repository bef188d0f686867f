//! `dormouse config`: checks a configuration file, and says what may be in one.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;

use anyhow::Context;
use clap::{Arg, ArgAction, CommandFactory, Subcommand};

use super::Cli;
use super::serve::ServeArgs;
use crate::config::Config;

/// The file with every setting, its default and what it means; a test compares its settings with
/// those the code reads.
const EXAMPLE: &str = include_str!("../../../configs/server.toml");

#[derive(Clone, Debug, Subcommand)]
pub enum ConfigCommand {
    /// Read a configuration file as `serve` would, and say what is wrong with it
    Check {
        /// The file (TOML)
        file: PathBuf,
        /// A model repository, for files that leave it to the command line
        #[arg(long, value_name = "DIR")]
        model_repository: Vec<PathBuf>,
    },
    /// Print a configuration file with every setting, its default and what it means
    Example,
    /// Print the reference of all flags, variables and settings, in Markdown
    Reference,
}

/// Runs `dormouse config`.
pub fn run(command: &ConfigCommand) -> anyhow::Result<u8> {
    let said = match command {
        ConfigCommand::Check {
            file,
            model_repository,
        } => {
            let args = ServeArgs {
                config: Some(file.clone()),
                model_repository: model_repository.clone(),
                ..ServeArgs::default()
            };
            Config::resolve(&args)?;
            format!("{} can be used\n", file.display())
        }
        ConfigCommand::Example => EXAMPLE.to_owned(),
        ConfigCommand::Reference => reference(),
    };
    let mut out = io::stdout().lock();
    out.write_all(said.as_bytes())
        .and_then(|()| out.flush())
        .context("cannot write to standard output")?;
    Ok(0)
}

/// All flags of `serve` with their variables, and the settings of the file.
fn reference() -> String {
    let mut page = String::from(
        "# Configuration reference\n\n\
         Printed by `dormouse config reference`; a test keeps this page as the code has it.\n\n\
         A flag wins over its environment variable, that over the file of `--config`, that over the\n\
         default. Unknown flags and settings are errors. Durations are written `500ms`, `30s`, `5m`,\n\
         sizes `64MiB`, `8GiB`. Triton's flags that are not listed are either ignored with a warning\n\
         or refused: [From Triton to Dormouse](from-triton.md).\n",
    );
    let command = Cli::command();
    let serve = command
        .find_subcommand("serve")
        .expect("serve is a command");
    let mut headings: Vec<&str> = Vec::new();
    for flag in serve.get_arguments() {
        let heading = heading(flag);
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }
    page.push_str("\n## Flags of `dormouse serve`\n");
    for name in headings {
        let _ = write!(
            page,
            "\n### {name}\n\n| flag | variable | |\n|---|---|---|\n"
        );
        let flags = serve.get_arguments();
        for flag in flags.filter(|flag| heading(flag) == name && !flag.is_hide_set()) {
            page.push_str(&row(flag));
        }
    }
    page.push_str("\n## The file\n\nEverything is optional. `dormouse config example` prints this:\n\n```toml\n");
    page.push_str(EXAMPLE);
    page.push_str("```\n");
    page
}

fn heading(flag: &Arg) -> &str {
    flag.get_help_heading().unwrap_or("General")
}

fn row(flag: &Arg) -> String {
    let mut names = vec![format!("--{}", flag.get_long().unwrap_or_default())];
    let aliases = flag.get_visible_aliases().unwrap_or_default();
    names.extend(aliases.into_iter().map(|alias| format!("--{alias}")));
    let value = match (flag.get_action(), flag.get_value_names()) {
        (ArgAction::Set | ArgAction::Append, Some([value, ..])) => format!(" {value}"),
        _ => String::new(),
    };
    let names: Vec<_> = names
        .iter()
        .map(|name| format!("`{name}{value}`"))
        .collect();
    let variable = flag
        .get_env()
        .map(|variable| format!("`{}`", variable.to_string_lossy()))
        .unwrap_or_default();
    let help = flag
        .get_help()
        .map(ToString::to_string)
        .unwrap_or_default()
        .replace('\n', " ")
        .replace('|', "\\|")
        .replace('*', "\\*");
    format!("| {} | {variable} | {help} |\n", names.join(", "))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use expect_test::expect_file;

    use super::*;
    use crate::config::FileConfig;
    use crate::config::keys::settings_of;

    /// The settings of the example, those that are commented out included.
    fn settings_of_example() -> BTreeSet<String> {
        let mut section = String::new();
        let mut settings = BTreeSet::new();
        for line in EXAMPLE.lines() {
            let line = line.trim_start_matches("# ").trim();
            if let Some(name) = line.strip_prefix('[') {
                let name = name.split(']').next().unwrap_or_default();
                section = format!("{}.", name.trim_start_matches('['));
            } else if let Some((key, _)) = line.split_once(" = ")
                && key
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
            {
                settings.insert(format!("{section}{key}"));
            }
        }
        settings
    }

    #[test]
    fn the_example_has_every_setting_and_no_other() {
        let read: BTreeSet<_> = settings_of::<FileConfig>().into_iter().collect();
        let written = settings_of_example();
        let missing: Vec<_> = read.difference(&written).collect();
        let unknown: Vec<_> = written.difference(&read).collect();
        assert!(
            missing.is_empty() && unknown.is_empty(),
            "configs/server.toml lacks {missing:?} and has {unknown:?}, which nothing reads"
        );
    }

    #[test]
    fn the_reference_is_as_the_code_has_it() {
        expect_file!["../../../docs/guide/configuration.md"].assert_eq(&reference());
    }
}
