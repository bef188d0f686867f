//! Completions and manual pages, both made from the definition of the command line.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use super::Cli;

/// Arguments of `dormouse man`.
#[derive(Args, Clone, Debug)]
pub struct ManArgs {
    /// The page of this command, such as serve or store ls
    #[arg(conflicts_with = "out")]
    pub command: Vec<String>,
    /// Write the pages of all commands into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Writes the completion script of a shell to standard output.
pub fn print_completions(shell: Shell) -> anyhow::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "dormouse", &mut script);
    to_stdout(&script)
}

/// Prints one page, or writes all of them.
pub fn run(args: &ManArgs) -> anyhow::Result<u8> {
    match &args.out {
        Some(folder) => {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot create {}", folder.display()))?;
            clap_mangen::generate_to(named(), folder)
                .with_context(|| format!("cannot write into {}", folder.display()))?;
            Ok(0)
        }
        None => to_stdout(&page(&args.command)?),
    }
}

/// The page of a command, in troff.
fn page(path: &[String]) -> anyhow::Result<Vec<u8>> {
    let mut command = named();
    command.build();
    let mut name = "dormouse".to_owned();
    for word in path {
        let Some(found) = command.find_subcommand(word) else {
            bail!("{name:?} has no command {word:?}");
        };
        name = format!("{name}-{word}");
        command = found.clone().display_name(name.clone()).name(name.clone());
    }
    let mut page = Vec::new();
    Man::new(command).render(&mut page)?;
    Ok(page)
}

/// The command line without `help`, whose pages would say what the others do.
fn named() -> clap::Command {
    Cli::command().disable_help_subcommand(true)
}

/// A reader who has seen enough and closes the pipe is no error.
fn to_stdout(bytes: &[u8]) -> anyhow::Result<u8> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(path: &[&str]) -> String {
        let path: Vec<_> = path.iter().map(ToString::to_string).collect();
        String::from_utf8(page(&path).unwrap()).unwrap()
    }

    #[test]
    fn every_command_has_a_page_and_every_page_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let out = Some(folder.path().join("man"));
        let args = ManArgs {
            command: Vec::new(),
            out,
        };
        run(&args).unwrap();
        let commands = Cli::command();
        let shown = commands.get_subcommands().filter(|it| !it.is_hide_set());
        for command in shown {
            let name = command.get_name();
            assert!(text(&[name]).contains(&format!(".TH dormouse-{name} 1")));
            let file = folder.path().join(format!("man/dormouse-{name}.1"));
            assert!(file.exists(), "no {}", file.display());
        }
        assert!(folder.path().join("man/dormouse-store-ls.1").exists());
    }

    #[test]
    fn a_page_has_the_flags_and_their_variables() {
        let page = text(&["serve"]);
        assert!(page.contains("keep\\-alive"), "{page}");
        assert!(page.contains("DORMOUSE_KEEP_ALIVE"), "{page}");
        assert!(text(&["store", "ls"]).contains("dormouse-store-ls"));
    }

    #[test]
    fn a_page_of_no_command_is_refused() {
        let error = page(&["store".to_owned(), "eat".to_owned()]).unwrap_err();
        assert_eq!(
            error.to_string(),
            r#""dormouse-store" has no command "eat""#
        );
    }

    #[test]
    fn completions_know_the_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "dormouse", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains("model-repository"), "{shell}: {script}");
        }
    }
}
