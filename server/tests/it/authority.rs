//! A certificate authority of our own, and the files that a guarded server is given.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    SanType,
};

/// Signs certificates.
#[derive(Debug)]
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its own certificate.
    pub(crate) pem: String,
}

impl Authority {
    pub(crate) fn new() -> Result<Self> {
        let mut params = CertificateParams::new(vec![])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        Ok(Self {
            issuer: Issuer::new(params, key),
            pem,
        })
    }

    /// A certificate and its key, good until the end of `year`.
    pub(crate) fn sign(&self, name: &str, year: i32) -> Result<(String, String)> {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()])?;
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        params.subject_alt_names.push(SanType::IpAddress(loopback));
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_after = rcgen::date_time_ymd(year, 12, 31);
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok((certificate.pem(), key.serialize_pem()))
    }
}

/// The folder with a server's certificate, key, tokens and configuration.
#[derive(Debug)]
pub(crate) struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    pub(crate) fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        Ok(Self { folder })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A flag with the path of a file.
    pub(crate) fn flag(&self, flag: &str, name: &str) -> String {
        format!("--{flag}={}", self.path(name).display())
    }

    /// Replaces a file at once, as careful people do.
    pub(crate) fn put(&self, name: &str, text: &str) -> Result<&Path> {
        let draft = self.path("draft");
        fs::write(&draft, text)?;
        fs::rename(draft, self.path(name))?;
        Ok(self.folder.path())
    }

    /// A server's certificate and key.
    pub(crate) fn put_pair(&self, authority: &Authority, name: &str, year: i32) -> Result<()> {
        let (certificate, key) = authority.sign(name, year)?;
        self.put("tls.key", &key)?;
        self.put("tls.crt", &certificate)?;
        self.put("ca.crt", &authority.pem)?;
        Ok(())
    }
}
