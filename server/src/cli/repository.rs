//! `dormouse repository`: writes the index of a repository for a web server.

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Context;
use clap::Subcommand;
use dormouse_core::id::ByteSize;

use crate::remote::index_file;

/// Commands about repositories, without a server.
#[derive(Debug, Subcommand)]
pub enum RepositoryCommand {
    /// Write index.json, which lists a folder's files with sizes and digests for a web server
    Index {
        /// Directory with one folder per model
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

/// Runs a command to its end. Blocks.
pub fn run(command: &RepositoryCommand) -> anyhow::Result<()> {
    let RepositoryCommand::Index { folder } = command;
    let indexed =
        index_file::write(folder).with_context(|| format!("cannot index {}", folder.display()))?;
    writeln!(
        std::io::stdout().lock(),
        "{}: {} files, {}",
        folder.join(index_file::INDEX_FILE).display(),
        indexed.files,
        ByteSize(indexed.bytes)
    )?;
    Ok(())
}
