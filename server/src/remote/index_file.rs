//! `index.json`: what a web server's folder holds, since web servers do not list their files.
//!
//! ```json
//! {"version": 1, "files": [
//!   {"path": "resnet/1/model.onnx", "size": 102442450, "sha256": "b05f0b..."}]}
//! ```

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use dormouse_model_store::names::check_relative_path;
use dormouse_model_store::repository::RemoteFile;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::error::{ErrorKind, RemoteError, printable};

/// The index's name in the repository's folder.
pub const INDEX_FILE: &str = "index.json";

/// The longest index: a hundred bytes per file for a repository as large as any.
pub(super) const MAX_INDEX_BYTES: u64 = 64 << 20;

const VERSION: u32 = 1;
const MAX_FILES: usize = 1_000_000;
const MAX_DEPTH: usize = 10;

#[derive(Debug, Serialize, Deserialize)]
struct Index {
    version: u32,
    files: Vec<IndexedFile>,
}

#[derive(Debug, Serialize, Deserialize)]
struct IndexedFile {
    path: String,
    size: u64,
    /// In hexadecimal digits.
    sha256: String,
}

/// Why a folder cannot be indexed.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} cannot be in a repository: its name is not usable", path.display())]
    Name { path: PathBuf },
    #[error(
        "there are more than {MAX_FILES} files or folders in folders more than {MAX_DEPTH} deep"
    )]
    TooMany,
}

/// What an index came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indexed {
    pub files: usize,
    pub bytes: u64,
}

/// Reads an index.
pub(super) fn parse(bytes: &[u8]) -> Result<Vec<RemoteFile>, RemoteError> {
    let malformed = |why: String| {
        RemoteError::new(
            ErrorKind::Malformed,
            format!("{INDEX_FILE} cannot be used: {why}"),
        )
    };
    let index: Index =
        serde_json::from_slice(bytes).map_err(|error| malformed(printable(&error.to_string())))?;
    if index.version != VERSION {
        return Err(malformed(format!(
            "it is of version {}, known is {VERSION}",
            index.version
        )));
    }
    if index.files.len() > MAX_FILES {
        return Err(malformed(format!("it lists more than {MAX_FILES} files")));
    }
    let mut paths = HashSet::new();
    let mut files = Vec::with_capacity(index.files.len());
    for file in index.files {
        let named = || printable(&file.path);
        if check_relative_path(&file.path).is_err() {
            return Err(malformed(format!("'{}' is not a usable path", named())));
        }
        let is_digest =
            file.sha256.len() == 64 && file.sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_digest {
            return Err(malformed(format!("'{}' has no SHA-256 digest", named())));
        }
        if !paths.insert(file.path.clone()) {
            return Err(malformed(format!("'{}' is listed twice", named())));
        }
        files.push(RemoteFile {
            tag: Some(format!("sha256:{}", file.sha256.to_ascii_lowercase())),
            path: file.path,
            size: file.size,
            modified_ns: 0,
            generation: None,
        });
    }
    Ok(files)
}

/// Writes the index of a folder into it, in one step. Hidden files are left out.
pub fn write(folder: &Path) -> Result<Indexed, IndexError> {
    let mut files = Vec::new();
    collect(folder, "", 0, &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let indexed = Indexed {
        files: files.len(),
        bytes: files.iter().map(|file| file.size).sum(),
    };
    let index = Index {
        version: VERSION,
        files,
    };
    let path = folder.join(INDEX_FILE);
    let written = || -> io::Result<()> {
        let mut file = tempfile::Builder::new()
            .prefix(".index")
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
            .tempfile_in(folder)?;
        serde_json::to_writer_pretty(&mut file, &index)?;
        file.write_all(b"\n")?;
        file.as_file().sync_all()?;
        file.persist(&path)?;
        Ok(())
    };
    written().map_err(|source| IndexError::Write {
        path: path.clone(),
        source,
    })?;
    Ok(indexed)
}

fn collect(
    root: &Path,
    below: &str,
    depth: usize,
    files: &mut Vec<IndexedFile>,
) -> Result<(), IndexError> {
    let folder = root.join(below);
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |source| IndexError::Read { path, source }
    };
    for entry in std::fs::read_dir(&folder).map_err(unreadable(&folder))? {
        let entry = entry.map_err(unreadable(&folder))?;
        let name = entry.file_name();
        let path = entry.path();
        let Some(name) = name.to_str() else {
            return Err(IndexError::Name { path });
        };
        if name.starts_with('.') || (below.is_empty() && name == INDEX_FILE) {
            continue;
        }
        let relative = match below {
            "" => name.to_owned(),
            below => format!("{below}/{name}"),
        };
        if check_relative_path(&relative).is_err() {
            return Err(IndexError::Name { path });
        }
        if depth > MAX_DEPTH || files.len() >= MAX_FILES {
            return Err(IndexError::TooMany);
        }
        // Links are followed: a web server sends what they lead to.
        let metadata = std::fs::metadata(&path).map_err(unreadable(&path))?;
        if metadata.is_dir() {
            collect(root, &relative, depth + 1, files)?;
        } else if metadata.is_file() {
            let (size, sha256) = digest(&path).map_err(unreadable(&path))?;
            files.push(IndexedFile {
                path: relative,
                size,
                sha256,
            });
        }
    }
    Ok(())
}

fn digest(path: &Path) -> io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut size = 0;
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok((size, hex(&hasher.finalize())));
        }
        size += read as u64;
        hasher.update(&buffer[..read]);
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folders_index_lists_what_a_repository_is_made_of() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, bytes: &[u8]| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        };
        write("m/config.pbtxt", b"");
        write("m/1/model.onnx", b"abc");
        write(".git/config", b"x");
        assert_eq!(
            super::write(folder.path()).unwrap(),
            Indexed { files: 2, bytes: 3 }
        );
        // A second time the index itself is there, and does not count.
        assert_eq!(
            super::write(folder.path()).unwrap(),
            Indexed { files: 2, bytes: 3 }
        );
        let bytes = std::fs::read(folder.path().join(INDEX_FILE)).unwrap();
        let files = parse(&bytes).unwrap();
        assert_eq!(files[0].path, "m/1/model.onnx");
        assert_eq!(
            files[0].tag.as_deref(),
            Some("sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
        );
    }

    #[test]
    fn an_index_that_leads_out_or_proves_nothing_is_refused() {
        let sha = "0".repeat(64);
        for (text, reason) in [
            ("{".to_owned(), "EOF"),
            (r#"{"version":2,"files":[]}"#.to_owned(), "version 2"),
            (
                format!(r#"{{"version":1,"files":[{{"path":"../x","size":1,"sha256":"{sha}"}}]}}"#),
                "not a usable path",
            ),
            (
                r#"{"version":1,"files":[{"path":"x","size":1,"sha256":"0"}]}"#.to_owned(),
                "no SHA-256 digest",
            ),
            (
                format!(
                    r#"{{"version":1,"files":[{{"path":"x","size":1,"sha256":"{sha}"}},{{"path":"x","size":1,"sha256":"{sha}"}}]}}"#
                ),
                "listed twice",
            ),
        ] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
    }
}
