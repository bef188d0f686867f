//! A varied dozen of files to show.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

const FILES: usize = 12;
/// A directory tree can be endless; a look at this many entries is enough for a dozen.
const MAX_ENTRIES: usize = 20_000;
const LEFT_BY_BUILDS: [&str; 3] = ["target", "node_modules", "__pycache__"];

/// Files below `root` of as many kinds as there are, closest to the root first, and a few that
/// are always at hand: `extra` and the running program.
pub(super) fn varied(root: &Path, extra: &[&Path]) -> Vec<PathBuf> {
    let mut by_kind: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for path in walk(root) {
        let kind = path
            .extension()
            .unwrap_or_else(|| path.file_name().unwrap_or_default());
        let kind = kind.to_string_lossy().to_ascii_lowercase();
        by_kind.entry(kind).or_default().push(path);
    }
    let program = std::env::current_exe().ok();
    let always: Vec<_> = extra
        .iter()
        .map(|path| path.to_path_buf())
        .chain(program)
        .collect();
    // One of each kind, the most common kinds first, then a second one, until there are enough.
    let mut by_kind: Vec<_> = by_kind.into_values().collect();
    by_kind.sort_by_key(|paths| std::cmp::Reverse(paths.len()));
    let mut found = Vec::new();
    let wanted = FILES.saturating_sub(always.len());
    let rounds = by_kind.iter().map(Vec::len).max().unwrap_or(0);
    for round in 0..rounds {
        let next = by_kind.iter().filter_map(|paths| paths.get(round));
        found.extend(next.take(wanted.saturating_sub(found.len())).cloned());
        if found.len() >= wanted {
            break;
        }
    }
    found.extend(always);
    found
}

/// A path as a person writes it: within the current directory, or within their own.
pub(super) fn shown(path: &Path) -> String {
    if let Ok(below) = path.strip_prefix(".") {
        return below.display().to_string();
    }
    let within = |root: Option<PathBuf>| path.strip_prefix(root?).ok();
    if let Some(below) = within(std::env::current_dir().ok()) {
        return below.display().to_string();
    }
    match within(std::env::home_dir().filter(|home| home.parent().is_some())) {
        Some(below) => format!("~/{}", below.display()),
        None => path.display().to_string(),
    }
}

/// Files breadth first, without what is hidden and what builds leave behind.
fn walk(root: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut directories = VecDeque::from([root.to_path_buf()]);
    let mut seen = 0;
    while let Some(directory) = directories.pop_front() {
        // What cannot be read is not shown; this is a sample.
        let Ok(entries) = fs::read_dir(&directory) else {
            continue;
        };
        let mut entries: Vec<_> = entries.flatten().take(MAX_ENTRIES).collect();
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            seen += 1;
            if seen > MAX_ENTRIES {
                return files;
            }
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with('.') {
                continue;
            }
            // Links are not followed, so the walk ends.
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && !LEFT_BY_BUILDS.contains(&&*name) => {
                    directories.push_back(entry.path());
                }
                Ok(kind) if kind.is_file() && fs::File::open(entry.path()).is_ok() => {
                    files.push(entry.path());
                }
                _ => {}
            }
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_come_before_numbers() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        fs::create_dir_all(root.join("deep/er")).unwrap();
        fs::create_dir_all(root.join("target")).unwrap();
        fs::create_dir_all(root.join(".git")).unwrap();
        for number in 0..30 {
            fs::write(root.join(format!("{number:02}.rs")), "fn").unwrap();
        }
        for name in [
            "deep/er/a.py",
            "deep/b.toml",
            "Makefile",
            "target/x.o",
            ".git/HEAD",
        ] {
            fs::write(root.join(name), "x").unwrap();
        }
        let chosen = varied(root, &[Path::new("model.onnx")]);
        let names: Vec<_> = chosen
            .iter()
            .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(
            names[..4],
            ["00.rs", "Makefile", "a.py", "b.toml"].map(String::from)
        );
        assert_eq!(chosen.len(), FILES);
        assert_eq!(names[10], "model.onnx");
        assert!(!names.iter().any(|name| name == "x.o" || name == "HEAD"));
    }

    #[test]
    fn an_empty_directory_leaves_what_is_at_hand() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(varied(directory.path(), &[]).len(), 1);
    }
}
