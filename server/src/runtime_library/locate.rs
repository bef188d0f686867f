//! Where the library may be, in the order that is tried.

use std::cmp::Reverse;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use super::{FILE_NAME, FOLDER, ONNX_RUNTIME};
use crate::assets::cache_folder_from;

/// The oldest version whose interface we speak.
const OLDEST: (u32, u32) = (1, 31);
const STEM: &str = "libonnxruntime.so";
const FLAG: &str = "--onnxruntime-library";
/// The first is ours, the second is the one other programs with the same bindings use.
const VARIABLES: [&str; 2] = ["DORMOUSE_ONNXRUNTIME", "ORT_DYLIB_PATH"];
const SYSTEM_FOLDERS: &[&str] = &[
    "/usr/local/lib",
    "/usr/local/lib64",
    #[cfg(target_arch = "x86_64")]
    "/usr/lib/x86_64-linux-gnu",
    #[cfg(target_arch = "aarch64")]
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
];

/// No usable library: every place that was tried, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFound {
    /// Where, and what was there.
    pub tried: Vec<(PathBuf, String)>,
    /// Set when one was asked for by name, and then nothing else was tried.
    pub asked_by: Option<&'static str>,
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.asked_by {
            Some(asked_by) => write!(
                f,
                "the ONNX Runtime library given by {asked_by} cannot be used"
            )?,
            None => f.write_str("no ONNX Runtime library was found")?,
        }
        for (place, why) in &self.tried {
            write!(f, "\n  {}: {why}", place.display())?;
        }
        match self.asked_by {
            Some(asked_by) => write!(f, "\ncorrect {asked_by}, or leave it out and")?,
            None => f.write_str("\nto get one,")?,
        }
        write!(
            f,
            " run `dormouse runtime install`, or name a library with {FLAG}"
        )
    }
}

impl std::error::Error for NotFound {}

/// The library to load: the one given (`--onnxruntime-library`), the one the environment names,
/// one beside the executable, the installed one, or one of the system's. One that is named and
/// cannot be used is an error.
pub fn locate(explicit: Option<&Path>) -> Result<PathBuf, NotFound> {
    Surroundings {
        variable: &|name| std::env::var_os(name),
        executable: std::env::current_exe().ok(),
        system: SYSTEM_FOLDERS.iter().map(PathBuf::from).collect(),
    }
    .locate(explicit)
}

/// What the search depends on.
struct Surroundings<'a> {
    variable: &'a dyn Fn(&str) -> Option<OsString>,
    executable: Option<PathBuf>,
    system: Vec<PathBuf>,
}

impl Surroundings<'_> {
    fn locate(&self, explicit: Option<&Path>) -> Result<PathBuf, NotFound> {
        if let Some(path) = explicit {
            return named(path, FLAG);
        }
        for variable in VARIABLES {
            if let Some(path) = self.value(variable) {
                return named(Path::new(&path), variable);
            }
        }
        let mut tried = Vec::new();
        for folder in self.folders() {
            match best_in(&folder) {
                Ok(library) => return Ok(library),
                Err(why) => tried.push((folder, why)),
            }
        }
        Err(NotFound {
            tried,
            asked_by: None,
        })
    }

    fn folders(&self) -> Vec<PathBuf> {
        let mut folders = Vec::new();
        if let Some(beside) = self.executable.as_deref().and_then(Path::parent) {
            folders.push(beside.to_owned());
            if let Some(lib) = beside.parent().map(|above| above.join("lib")) {
                folders.push(lib.clone());
                folders.extend(python_packages(&lib));
            }
        }
        let cache = cache_folder_from(|name| (self.variable)(name));
        folders.extend(cache.map(|cache| cache.join(FOLDER).join(ONNX_RUNTIME.folder())));
        if let Some(list) = self.value("LD_LIBRARY_PATH") {
            folders.extend(std::env::split_paths(&list).filter(|path| path.is_absolute()));
        }
        folders.extend(self.system.iter().cloned());
        folders
    }

    fn value(&self, variable: &str) -> Option<OsString> {
        (self.variable)(variable).filter(|value| !value.is_empty())
    }
}

/// Where the Python package `onnxruntime` keeps its library, if this program was installed beside
/// it by pip.
fn python_packages(lib: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(lib) else {
        return Vec::new();
    };
    let mut found: Vec<_> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| entry.path().join("site-packages/onnxruntime/capi"))
        .filter(|folder| folder.is_dir())
        .collect();
    found.sort();
    found
}

/// A library that was asked for: a file, or a folder that holds one.
fn named(path: &Path, asked_by: &'static str) -> Result<PathBuf, NotFound> {
    let found = match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => best_in(path),
        Ok(metadata) if metadata.is_file() => Ok(path.to_owned()),
        Ok(_) => Err("it is neither a file nor a folder".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    found.map_err(|why| NotFound {
        tried: vec![(path.to_owned(), why)],
        asked_by: Some(asked_by),
    })
}

/// The best library of a folder, or why there is none: the pinned version, else the newest.
fn best_in(folder: &Path) -> Result<PathBuf, String> {
    let entries = fs::read_dir(folder).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => "no such folder".to_owned(),
        _ => error.to_string(),
    })?;
    let mut usable = Vec::new();
    let mut old = Vec::new();
    for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        if !is_library(name) || !path.is_file() {
            continue;
        }
        match version(&path) {
            Some(version) if (version[0], version[1]) < OLDEST => {
                old.push(format!(
                    "{name} is version {}.{}, older than {}.{}",
                    version[0], version[1], OLDEST.0, OLDEST.1
                ));
            }
            version => {
                let rank = (name == FILE_NAME, version.unwrap_or_default());
                usable.push((Reverse(rank), path));
            }
        }
    }
    usable.sort();
    match usable.into_iter().next() {
        Some((_, path)) => Ok(path),
        None if old.is_empty() => Err(format!("no {STEM} in it")),
        None => {
            old.sort();
            Err(old.join(", "))
        }
    }
}

fn is_library(name: &str) -> bool {
    name.strip_prefix(STEM)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The version in a library's file name, or in that of the file it links to.
fn version(path: &Path) -> Option<[u32; 3]> {
    let target = fs::canonicalize(path).ok();
    [Some(path.to_owned()), target]
        .into_iter()
        .flatten()
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?;
            let mut parts = name.strip_prefix(STEM)?.strip_prefix('.')?.split('.');
            let mut next = || parts.next()?.parse().ok();
            // `libonnxruntime.so.1` alone tells too little.
            Some([next()?, next()?, next().unwrap_or(0)])
        })
        .next()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine {
        root: tempfile::TempDir,
        variables: Vec<(&'static str, OsString)>,
    }

    impl Machine {
        fn new() -> Self {
            Self {
                root: tempfile::tempdir().unwrap(),
                variables: Vec::new(),
            }
        }

        fn put(&self, path: &str) -> PathBuf {
            let path = self.root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, b"library").unwrap();
            path
        }

        fn set(&mut self, name: &'static str, path: &str) {
            let value = self.root.path().join(path).into_os_string();
            self.variables.push((name, value));
        }

        fn locate(&self, explicit: Option<&Path>) -> Result<PathBuf, NotFound> {
            Surroundings {
                variable: &|name| {
                    let (_, value) = self.variables.iter().find(|(key, _)| *key == name)?;
                    Some(value.clone())
                },
                executable: Some(self.root.path().join("app/bin/dormouse")),
                system: vec![self.root.path().join("usr/lib")],
            }
            .locate(explicit)
        }
    }

    #[test]
    fn places_are_tried_in_their_order() {
        let mut machine = Machine::new();
        let system = machine.put("usr/lib/libonnxruntime.so.1.31.0");
        assert_eq!(machine.locate(None), Ok(system));

        machine.set("LD_LIBRARY_PATH", "loader");
        let loader = machine.put("loader/libonnxruntime.so");
        assert_eq!(machine.locate(None), Ok(loader));

        machine.set("DORMOUSE_CACHE_DIR", "cache");
        let cached = machine.put("cache/runtime/onnxruntime-1.31.1/libonnxruntime.so.1.31.1");
        assert_eq!(machine.locate(None), Ok(cached));

        let lib = machine.put("app/lib/libonnxruntime.so");
        assert_eq!(machine.locate(None), Ok(lib));
        let beside = machine.put("app/bin/libonnxruntime.so.1.31.1");
        assert_eq!(machine.locate(None), Ok(beside));

        let other = machine.put("else/other.so");
        machine.set("ORT_DYLIB_PATH", "else/other.so");
        assert_eq!(machine.locate(None), Ok(other));
        let own = machine.put("else/own.so");
        machine.set("DORMOUSE_ONNXRUNTIME", "else/own.so");
        assert_eq!(machine.locate(None), Ok(own));

        let flag = machine.put("else/flag.so");
        assert_eq!(machine.locate(Some(&flag)), Ok(flag.clone()));
    }

    #[test]
    fn pips_onnxruntime_beside_the_program_is_found() {
        let machine = Machine::new();
        let library = machine
            .put("app/lib/python3.12/site-packages/onnxruntime/capi/libonnxruntime.so.1.31.1");
        machine.put("app/lib/python3.12/site-packages/numpy/libonnxruntime.so.1.31.1");
        assert_eq!(machine.locate(None), Ok(library));
        let nearer = machine.put("app/lib/libonnxruntime.so.1.31.1");
        assert_eq!(machine.locate(None), Ok(nearer));
    }

    #[test]
    fn a_named_library_that_is_missing_is_an_error() {
        let mut machine = Machine::new();
        machine.put("usr/lib/libonnxruntime.so.1.31.1");
        let missing = machine.root.path().join("nowhere.so");
        let error = machine.locate(Some(&missing)).unwrap_err();
        assert_eq!(error.asked_by, Some("--onnxruntime-library"));
        assert!(error.to_string().contains("nowhere.so"), "{error}");

        machine.set("DORMOUSE_ONNXRUNTIME", "nowhere.so");
        let error = machine.locate(None).unwrap_err();
        assert_eq!(error.asked_by, Some("DORMOUSE_ONNXRUNTIME"));
    }

    #[test]
    fn the_error_lists_every_place_and_the_way_out() {
        let mut machine = Machine::new();
        machine.set("DORMOUSE_CACHE_DIR", "cache");
        machine.put("usr/lib/libonnxruntime.so.1.20.2");
        machine.put("usr/lib/libonnxruntime_providers_shared.so");
        let error = machine.locate(None).unwrap_err();
        assert_eq!(error.tried.len(), 4, "{error}");
        let text = error.to_string();
        assert!(text.contains("version 1.20, older than 1.31"), "{text}");
        assert!(
            text.contains("onnxruntime-1.31.1: no such folder"),
            "{text}"
        );
        assert!(text.contains("dormouse runtime install"), "{text}");
    }

    #[test]
    fn the_pinned_version_goes_before_a_newer_one() {
        let machine = Machine::new();
        machine.put("usr/lib/libonnxruntime.so.1.33.0");
        let newer = machine.locate(None).unwrap();
        assert!(newer.ends_with("libonnxruntime.so.1.33.0"));
        let pinned = machine.put("usr/lib/libonnxruntime.so.1.31.1");
        assert_eq!(machine.locate(None), Ok(pinned));
    }

    #[test]
    #[cfg(unix)]
    fn a_link_has_the_version_of_its_target() {
        let machine = Machine::new();
        let old = machine.put("elsewhere/libonnxruntime.so.1.19.0");
        fs::create_dir_all(machine.root.path().join("usr/lib")).unwrap();
        let link = machine.root.path().join("usr/lib/libonnxruntime.so");
        std::os::unix::fs::symlink(old, link).unwrap();
        assert!(machine.locate(None).is_err());
    }
}
