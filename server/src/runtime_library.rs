//! Finds the ONNX Runtime library, and installs it where none is.

mod locate;

use std::io::Write;
use std::path::{Path, PathBuf};

pub use self::locate::{NotFound, locate};
use crate::assets::{InstallError, Progress, Wheel, WheelAsset, cache_folder, progress};

/// The version that is installed, and the oldest that can be used is its minor version.
pub const VERSION: &str = "1.31.1";
const FILE_NAME: &str = "libonnxruntime.so.1.31.1";
/// The folder of the cache that holds libraries.
const FOLDER: &str = "runtime";

static ONNX_RUNTIME: WheelAsset = WheelAsset {
    package: "onnxruntime",
    version: VERSION,
    wheels: &[
        Wheel {
            target: Some(("linux", "x86_64")),
            platform: "manylinux_2_28_x86_64",
            sha256: "5752bd508126ae7c49894d3b9d2e83f0c3d487319246d04c444b393308d7ad7f",
            bytes: 23_753_652,
        },
        Wheel {
            target: Some(("linux", "aarch64")),
            platform: "manylinux_2_28_aarch64",
            sha256: "da05378364c44d4407e463982d2bf8d5e4cfea873283757e48beeb41df97b7f3",
            bytes: 21_413_526,
        },
    ],
    members: &[
        ("onnxruntime/capi/libonnxruntime.so.1.31.1", FILE_NAME),
        (
            "onnxruntime/capi/libonnxruntime_providers_shared.so",
            "libonnxruntime_providers_shared.so",
        ),
        ("onnxruntime/LICENSE", "LICENSE"),
        ("onnxruntime/ThirdPartyNotices.txt", "ThirdPartyNotices.txt"),
    ],
};

/// A library that is in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    pub library: PathBuf,
    pub version: &'static str,
}

/// Downloads ONNX Runtime into Dormouse's cache, or finds it there.
pub fn install(progress: &dyn Progress) -> Result<Installed, InstallError> {
    install_in(&cache_folder()?, progress)
}

/// See [`install`]; `cache` is the cache folder.
pub fn install_in(cache: &Path, progress: &dyn Progress) -> Result<Installed, InstallError> {
    let folder = ONNX_RUNTIME.install(&cache.join(FOLDER), progress)?;
    Ok(Installed {
        library: folder.join(FILE_NAME),
        version: VERSION,
    })
}

/// Why a `dormouse runtime` command failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("ONNX Runtime could not be installed")]
    Install(#[from] InstallError),
    #[error(transparent)]
    NotFound(#[from] NotFound),
    #[error("cannot write the answer")]
    Output(#[from] std::io::Error),
}

/// `dormouse runtime install`: installs the library and says where.
pub fn run_install(out: &mut dyn Write) -> Result<(), CommandError> {
    let installed = install(&*progress())?;
    writeln!(
        out,
        "ONNX Runtime {} is installed: {}",
        installed.version,
        installed.library.display()
    )?;
    Ok(())
}

/// `dormouse runtime path`: says which library a server started now would use.
pub fn run_path(explicit: Option<&Path>, out: &mut dyn Write) -> Result<(), CommandError> {
    writeln!(out, "{}", locate(explicit)?.display())?;
    Ok(())
}
