//! The settings of who may do what: flags, the file's sections, and both joined.

use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;

use super::{ConfigError, ListenConfig, invalid, listen};
use crate::cli::serve::parse_bool;
use crate::guard::{ClientAuth, GuardConfig, JwtConfig, QuotaSection, Scope, Scopes, TlsConfig};

const HEADING: &str = "Security";

/// Flags of who may do what. Those that begin with `--grpc-` are Triton's.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = HEADING)]
pub struct GuardArgs {
    /// Certificate (PEM, with those between it and its authority): every port speaks TLS
    #[arg(long, value_name = "FILE", env = "DORMOUSE_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Private key (PEM) of the certificate
    #[arg(long, value_name = "FILE", env = "DORMOUSE_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// Authorities (PEM) of clients' certificates: clients show one
    #[arg(long, value_name = "FILE", env = "DORMOUSE_TLS_CLIENT_CA")]
    pub tls_client_ca: Option<PathBuf>,
    /// Whether clients must show a certificate [default: required]
    #[arg(long, value_name = "WHETHER", env = "DORMOUSE_TLS_CLIENT_AUTH")]
    pub tls_client_auth: Option<ClientAuth>,
    /// TLS on the gRPC port, with --grpc-server-cert and --grpc-server-key
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool)]
    pub grpc_use_ssl: Option<bool>,
    /// TLS on the gRPC port, where clients show a certificate that --grpc-root-cert vouches for
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool)]
    pub grpc_use_ssl_mutual: Option<bool>,
    /// Certificate of the gRPC port
    #[arg(long, value_name = "FILE")]
    pub grpc_server_cert: Option<PathBuf>,
    /// Private key of the gRPC port's certificate
    #[arg(long, value_name = "FILE")]
    pub grpc_server_key: Option<PathBuf>,
    /// Authorities of the gRPC port's clients
    #[arg(long, value_name = "FILE")]
    pub grpc_root_cert: Option<PathBuf>,
    /// Who may do what: a file (TOML) of tokens, or their hashes, with names and scopes
    #[arg(long, value_name = "FILE", env = "DORMOUSE_AUTH_TOKENS")]
    pub auth_tokens: Option<PathBuf>,
    /// Keys (JWKS, or public keys as PEM) of those whose JSON web tokens are accepted
    #[arg(long, value_name = "FILE", env = "DORMOUSE_AUTH_JWT_KEYS")]
    pub auth_jwt_keys: Option<PathBuf>,
    /// For whom these tokens must be; may be given several times
    #[arg(
        long,
        value_name = "NAME",
        env = "DORMOUSE_AUTH_JWT_AUDIENCE",
        value_delimiter = ','
    )]
    pub auth_jwt_audience: Vec<String>,
    /// From whom they must be
    #[arg(long, value_name = "NAME", env = "DORMOUSE_AUTH_JWT_ISSUER")]
    pub auth_jwt_issuer: Option<String>,
    /// Serve other machines without asking anybody who they are
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_ALLOW_UNAUTHENTICATED")]
    pub allow_unauthenticated: Option<bool>,
    /// Let other machines load and unload models without asking who they are
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_ALLOW_REMOTE_MANAGEMENT")]
    pub allow_remote_management: Option<bool>,
    /// Port (HTTP and gRPC) on which models are loaded and unloaded, and on no other
    #[arg(long, value_name = "PORT", env = "DORMOUSE_MANAGEMENT_PORT")]
    pub management_port: Option<u16>,
    /// Address of the management port [default: 127.0.0.1]
    #[arg(long, value_name = "ADDRESS", env = "DORMOUSE_MANAGEMENT_ADDRESS")]
    pub management_address: Option<String>,
}

/// The file's `[tls]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsSection {
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
    pub client_ca: Option<PathBuf>,
    pub client_auth: Option<ClientAuth>,
    /// Of clients whose certificate no entry in the file of tokens names.
    pub client_scopes: Option<Vec<String>>,
    pub http: Option<bool>,
    pub grpc: Option<bool>,
    pub metrics: Option<bool>,
    pub management: Option<bool>,
}

/// The file's `[auth]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuthSection {
    pub tokens: Option<PathBuf>,
    pub jwt_keys: Option<PathBuf>,
    pub jwt_audience: Vec<String>,
    pub jwt_issuer: Option<String>,
    pub jwt_scope_claim: Option<String>,
    /// Liveness and readiness need no credential.
    pub open_probes: Option<bool>,
    pub allow_unauthenticated: Option<bool>,
}

/// The file's `[management]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ManagementSection {
    pub address: Option<String>,
    pub port: Option<u16>,
    pub allow_remote: Option<bool>,
}

/// The sections that belong together here.
#[derive(Debug)]
pub(super) struct GuardSections {
    pub(super) tls: TlsSection,
    pub(super) auth: AuthSection,
    pub(super) management: ManagementSection,
    pub(super) quotas: QuotaSection,
}

/// Joins flags with the file's sections.
pub(super) fn join(args: &GuardArgs, file: GuardSections) -> Result<GuardConfig, ConfigError> {
    let tokens = args.auth_tokens.clone().or(file.auth.tokens);
    let client_scopes = match &file.tls.client_scopes {
        Some(names) => scopes(names)?,
        // Where somebody lists who may do what, who is not listed may do nothing.
        None if tokens.is_some() => Scopes::default(),
        None => [Scope::Inference, Scope::Metrics].into_iter().collect(),
    };
    let jwt_keys = args.auth_jwt_keys.clone().or(file.auth.jwt_keys);
    let audiences = match args.auth_jwt_audience.is_empty() {
        true => file.auth.jwt_audience,
        false => args.auth_jwt_audience.clone(),
    };
    let issuer = args.auth_jwt_issuer.clone().or(file.auth.jwt_issuer);
    let jwt = match jwt_keys {
        Some(_) if audiences.is_empty() => {
            return Err(invalid(
                "--auth-jwt-audience",
                "is needed with --auth-jwt-keys: otherwise tokens that were made for other \
                 services would be accepted",
            ));
        }
        Some(keys) => Some(JwtConfig {
            keys,
            audiences,
            issuer,
            scope_claim: file.auth.jwt_scope_claim.unwrap_or_else(|| "scope".into()),
        }),
        None if !audiences.is_empty() || issuer.is_some() => {
            return Err(invalid(
                "--auth-jwt-keys",
                "is missing: without keys no token could be checked",
            ));
        }
        None => None,
    };
    let quotas = file.quotas.over(Default::default());
    if quotas.concurrency == Some(0) {
        return Err(invalid("quotas.concurrency", "must be at least 1"));
    }
    let port = args.management_port.or(file.management.port);
    let address = args.management_address.clone().or(file.management.address);
    let management = match port {
        Some(port) => listen(
            true,
            Some(address.as_deref().unwrap_or("127.0.0.1")),
            port,
            "--management-address",
        )?,
        None if address.is_some() => {
            return Err(invalid(
                "--management-port",
                "is missing beside its address",
            ));
        }
        None => None,
    };
    Ok(GuardConfig {
        tls: tls(args, file.tls)?,
        tokens,
        jwt,
        certificate_scopes: client_scopes,
        guard_probes: !file.auth.open_probes.unwrap_or(true),
        allow_unauthenticated: args
            .allow_unauthenticated
            .or(file.auth.allow_unauthenticated)
            .unwrap_or(false),
        remote_management: args
            .allow_remote_management
            .or(file.management.allow_remote)
            .unwrap_or(false),
        management,
        quotas,
    })
}

fn scopes(names: &[String]) -> Result<Scopes, ConfigError> {
    let parse = |name: &String| {
        Scope::from_name(name).ok_or_else(|| {
            let known = Scope::ALL.map(Scope::name).join(", ");
            invalid(
                "tls.client_scopes",
                format!("unknown scope '{}': known are {known}", name.escape_debug()),
            )
        })
    };
    names.iter().map(parse).collect()
}

fn tls(args: &GuardArgs, file: TlsSection) -> Result<Option<TlsConfig>, ConfigError> {
    let is_mutual = args.grpc_use_ssl_mutual.unwrap_or(false);
    let is_triton = is_mutual || args.grpc_use_ssl.unwrap_or(false);
    let ours = args.tls_cert.clone().or(file.cert);
    let our_key = args.tls_key.clone().or(file.key);
    let our_ca = args.tls_client_ca.clone().or(file.client_ca);
    let is_ours = ours.is_some() || our_key.is_some() || our_ca.is_some();
    if !is_triton {
        let promised = [
            ("--grpc-server-cert", &args.grpc_server_cert),
            ("--grpc-server-key", &args.grpc_server_key),
            ("--grpc-root-cert", &args.grpc_root_cert),
        ];
        if let Some((flag, _)) = promised.into_iter().find(|(_, value)| value.is_some()) {
            return Err(invalid(flag, "has no effect without --grpc-use-ssl"));
        }
    }
    if our_ca.is_none() && args.tls_client_auth.or(file.client_auth).is_some() {
        return Err(invalid(
            "--tls-client-auth",
            "has no effect without --tls-client-ca: nobody would be asked for a certificate",
        ));
    }
    if our_ca.is_none() && !is_mutual && file.client_scopes.is_some() {
        return Err(invalid(
            "tls.client_scopes",
            "has no effect without --tls-client-ca",
        ));
    }
    if is_triton && is_ours {
        return Err(invalid(
            "--grpc-use-ssl",
            "does not go together with --tls-cert, which is for every port, this one included",
        ));
    }
    if is_triton {
        let needed = |value: &Option<PathBuf>, flag| {
            value
                .clone()
                .ok_or_else(|| invalid(flag, "is needed with --grpc-use-ssl"))
        };
        let root = args.grpc_root_cert.clone();
        if is_mutual && root.is_none() {
            return Err(invalid(
                "--grpc-root-cert",
                "is needed with --grpc-use-ssl-mutual",
            ));
        }
        return Ok(Some(TlsConfig {
            cert: needed(&args.grpc_server_cert, "--grpc-server-cert")?,
            key: needed(&args.grpc_server_key, "--grpc-server-key")?,
            client_ca: root.filter(|_| is_mutual),
            client_auth: ClientAuth::Required,
            http: false,
            grpc: true,
            metrics: false,
            management: false,
        }));
    }
    match (ours, our_key) {
        (Some(cert), Some(key)) => Ok(Some(TlsConfig {
            cert,
            key,
            client_ca: our_ca,
            client_auth: args
                .tls_client_auth
                .or(file.client_auth)
                .unwrap_or_default(),
            http: file.http.unwrap_or(true),
            grpc: file.grpc.unwrap_or(true),
            metrics: file.metrics.unwrap_or(true),
            management: file.management.unwrap_or(true),
        })),
        (None, None) if our_ca.is_none() => Ok(None),
        (Some(_), None) => Err(invalid("--tls-key", "is needed with --tls-cert")),
        (None, _) => Err(invalid(
            "--tls-cert",
            "is needed with --tls-key and --tls-client-ca",
        )),
    }
}

/// Refuses addresses that other machines reach while nobody is asked who they are.
pub(super) fn check_exposure(
    guard: &GuardConfig,
    listeners: [(&'static str, Option<&ListenConfig>); 4],
) -> Result<(), ConfigError> {
    for (setting, listener) in listeners {
        if let Some(listener) = listener {
            let exposed = guard.check_exposure(listener.address);
            exposed.map_err(|error| invalid(setting, error.to_string()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(args: GuardArgs, tls: TlsSection) -> Result<GuardConfig, ConfigError> {
        let sections = GuardSections {
            tls,
            auth: AuthSection::default(),
            management: ManagementSection::default(),
            quotas: QuotaSection::default(),
        };
        join(&args, sections)
    }

    fn with_certificate() -> GuardArgs {
        GuardArgs {
            tls_cert: Some("tls.crt".into()),
            tls_key: Some("tls.key".into()),
            ..GuardArgs::default()
        }
    }

    #[test]
    fn settings_that_would_protect_nothing_are_refused() {
        let required = GuardArgs {
            tls_client_auth: Some(ClientAuth::Required),
            ..with_certificate()
        };
        let scopes = TlsSection {
            client_scopes: Some(vec!["metrics".to_owned()]),
            ..TlsSection::default()
        };
        let key_only = GuardArgs {
            tls_cert: None,
            ..with_certificate()
        };
        let audience_only = GuardArgs {
            auth_jwt_audience: vec!["dormouse".to_owned()],
            ..GuardArgs::default()
        };
        for (args, tls, setting) in [
            (required, TlsSection::default(), "--tls-client-auth"),
            (with_certificate(), scopes, "tls.client_scopes"),
            (key_only, TlsSection::default(), "--tls-cert"),
            (audience_only, TlsSection::default(), "--auth-jwt-keys"),
        ] {
            let error = joined(args, tls).unwrap_err().to_string();
            assert!(error.contains(setting), "{setting}: {error}");
        }
    }

    #[test]
    fn who_shows_a_certificate_may_run_models_and_manage_none() {
        let args = GuardArgs {
            tls_client_ca: Some("clients.crt".into()),
            ..with_certificate()
        };
        let config = joined(args.clone(), TlsSection::default()).unwrap();
        assert!(config.authenticates());
        assert!(config.certificate_scopes.contains(Scope::Inference));
        assert!(!config.certificate_scopes.contains(Scope::Management));
        let listed = GuardArgs {
            auth_tokens: Some("tokens.toml".into()),
            ..args
        };
        let config = joined(listed, TlsSection::default()).unwrap();
        assert!(config.certificate_scopes.is_empty());
    }
}
