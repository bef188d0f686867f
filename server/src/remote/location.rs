//! Where a repository is, as its address says: `s3://`, `gs://`, `as://`, `https://`.

use std::fmt;

use http::Uri;

/// The longest address that makes sense.
const MAX_ADDRESS: usize = 2048;

/// A remote repository's address, taken apart. Printing it shows no secret: there is none in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    S3 {
        /// Scheme, host and port of a server that is not AWS's.
        endpoint: Option<String>,
        bucket: String,
        prefix: String,
    },
    Google {
        bucket: String,
        prefix: String,
    },
    Azure {
        account: String,
        container: String,
        prefix: String,
    },
    /// A folder on a web server, without a slash at its end.
    Web {
        base: String,
    },
}

/// Why an address cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocationError {
    #[error(
        "'{scheme}://' is not a kind of repository: known are s3://, gs://, as:// and https://"
    )]
    Scheme { scheme: String },
    #[error("{what} is missing: expected {form}")]
    Missing {
        what: &'static str,
        form: &'static str,
    },
    #[error("'{name}' is not a name of a {what}")]
    Name { what: &'static str, name: String },
    #[error(
        "the path has a part that is empty, '.' or '..', or a character that has no place in it"
    )]
    Path,
    #[error("a user name or a password has no place in it; credentials come from the environment")]
    Credentials,
    #[error("a query or a fragment has no place in it")]
    Query,
    #[error("it is not an address: {0}")]
    Malformed(String),
    #[error("it is longer than {MAX_ADDRESS} characters")]
    TooLong,
    #[error(
        "http:// is for servers of this machine; what comes from others could be changed on the \
         way, so that they have to be named with --allow-repository"
    )]
    Plain,
    #[error("it is not among what --allow-repository allows")]
    NotAllowed,
}

const S3_FORM: &str = "s3://BUCKET/PREFIX or s3://https://HOST:PORT/BUCKET/PREFIX";
const GS_FORM: &str = "gs://BUCKET/PREFIX";
const AS_FORM: &str = "as://ACCOUNT/CONTAINER/PREFIX";

impl Location {
    /// Whether a repository's name is an address and not a path.
    pub fn is_address(name: &str) -> bool {
        name.split_once("://").is_some_and(|(scheme, _)| {
            let mut letters = scheme.bytes();
            letters
                .next()
                .is_some_and(|first| first.is_ascii_alphabetic())
                && letters.all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
        })
    }

    /// Takes an address apart.
    pub fn parse(address: &str) -> Result<Self, LocationError> {
        if address.len() > MAX_ADDRESS {
            return Err(LocationError::TooLong);
        }
        let Some((scheme, rest)) = address.split_once("://") else {
            return Err(LocationError::Scheme {
                scheme: String::new(),
            });
        };
        if rest.contains(['?', '#']) {
            return Err(LocationError::Query);
        }
        match scheme.to_ascii_lowercase().as_str() {
            "s3" => Self::parse_s3(rest),
            "gs" | "gcs" => {
                let (bucket, prefix) = bucket(rest, "bucket", GS_FORM)?;
                Ok(Self::Google { bucket, prefix })
            }
            "as" | "az" | "azure" => {
                let (account, rest) = rest.split_once('/').unwrap_or((rest, ""));
                // The account's host may be given in its place.
                let account = name(account.split('.').next().unwrap_or(""), "account", AS_FORM)?;
                let (container, prefix) = bucket(rest, "container", AS_FORM)?;
                Ok(Self::Azure {
                    account,
                    container,
                    prefix,
                })
            }
            scheme @ ("https" | "http") => {
                let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
                let endpoint = endpoint(scheme, host)?;
                let path = prefix_of(path)?;
                Ok(Self::Web {
                    base: match path.as_str() {
                        "" => endpoint,
                        path => format!("{endpoint}/{path}"),
                    },
                })
            }
            scheme => Err(LocationError::Scheme {
                scheme: scheme.to_owned(),
            }),
        }
    }

    fn parse_s3(rest: &str) -> Result<Self, LocationError> {
        let server = |scheme: &str, rest: &str| {
            let (host, rest) = rest.split_once('/').unwrap_or((rest, ""));
            let (bucket, prefix) = bucket(rest, "bucket", S3_FORM)?;
            Ok(Self::S3 {
                endpoint: Some(endpoint(scheme, host)?),
                bucket,
                prefix,
            })
        };
        if let Some(rest) = rest.strip_prefix("https://") {
            return server("https", rest);
        }
        if let Some(rest) = rest.strip_prefix("http://") {
            return server("http", rest);
        }
        // Triton takes a first part with a port for a server, reached without TLS.
        if rest
            .split('/')
            .next()
            .is_some_and(|first| first.contains(':'))
        {
            return server("http", rest);
        }
        let (bucket, prefix) = bucket(rest, "bucket", S3_FORM)?;
        Ok(Self::S3 {
            endpoint: None,
            bucket,
            prefix,
        })
    }

    /// Whether this is all that the other address stands for, or lies in it.
    pub fn is_within(&self, other: &Self) -> bool {
        let place = |location: &Self| match location {
            Self::S3 {
                endpoint,
                bucket,
                prefix,
            } => (
                format!("s3 {} {bucket}", endpoint.as_deref().unwrap_or_default()),
                prefix.clone(),
            ),
            Self::Google { bucket, prefix } => (format!("gs {bucket}"), prefix.clone()),
            Self::Azure {
                account,
                container,
                prefix,
            } => (format!("as {account} {container}"), prefix.clone()),
            Self::Web { base } => {
                let start = base.find("://").map_or(0, |at| at + 3);
                let end = base[start..].find('/').map_or(base.len(), |at| start + at);
                let path = base[end..].trim_start_matches('/');
                (base[..end].to_owned(), path.to_owned())
            }
        };
        let ((here, path), (there, allowed)) = (place(self), place(other));
        let rest = path.strip_prefix(allowed.as_str());
        here == there
            && (allowed.is_empty()
                || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
    }

    /// Checks the address against what may be reached. An empty list allows what is named, other
    /// than servers on the network that are spoken to without TLS.
    pub fn check(&self, allowed: &[Self]) -> Result<(), LocationError> {
        if allowed.iter().any(|allowed| self.is_within(allowed)) {
            return Ok(());
        }
        if !allowed.is_empty() {
            return Err(LocationError::NotAllowed);
        }
        match self {
            Self::Web { base } if base.starts_with("http://") && !is_this_machine(base) => {
                Err(LocationError::Plain)
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, prefix) = match self {
            Self::S3 {
                endpoint: None,
                bucket,
                prefix,
            } => (format!("s3://{bucket}"), prefix),
            Self::S3 {
                endpoint: Some(endpoint),
                bucket,
                prefix,
            } => (format!("s3://{endpoint}/{bucket}"), prefix),
            Self::Google { bucket, prefix } => (format!("gs://{bucket}"), prefix),
            Self::Azure {
                account,
                container,
                prefix,
            } => (format!("as://{account}/{container}"), prefix),
            Self::Web { base } => return f.write_str(base),
        };
        match prefix.as_str() {
            "" => f.write_str(&start),
            prefix => write!(f, "{start}/{prefix}"),
        }
    }
}

/// Whether a web address names this machine by number or by its own name.
fn is_this_machine(base: &str) -> bool {
    let Ok(uri) = base.parse::<Uri>() else {
        return false;
    };
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    match host.parse::<std::net::IpAddr>() {
        Ok(address) => address.is_loopback(),
        Err(_) => host == "localhost",
    }
}

fn bucket(
    rest: &str,
    what: &'static str,
    form: &'static str,
) -> Result<(String, String), LocationError> {
    let (bucket, path) = rest.split_once('/').unwrap_or((rest, ""));
    Ok((name(bucket, what, form)?, prefix_of(path)?))
}

fn name(name: &str, what: &'static str, form: &'static str) -> Result<String, LocationError> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.$".contains(&byte);
    match name {
        "" => Err(LocationError::Missing { what, form }),
        _ if name.contains('@') => Err(LocationError::Credentials),
        "." | ".." => Err(LocationError::Path),
        _ if name.bytes().all(fits) => Ok(name.to_owned()),
        _ => Err(LocationError::Name {
            what,
            name: name.escape_default().to_string(),
        }),
    }
}

/// A path without slashes at its ends.
fn prefix_of(path: &str) -> Result<String, LocationError> {
    let path = path.trim_end_matches('/');
    if path.is_empty() {
        return Ok(String::new());
    }
    let fits = |part: &str| {
        !matches!(part, "" | "." | "..") && !part.contains(|c: char| c.is_control() || c == '\\')
    };
    match path.split('/').all(fits) {
        true => Ok(path.to_owned()),
        false => Err(LocationError::Path),
    }
}

fn endpoint(scheme: &str, host: &str) -> Result<String, LocationError> {
    if host.contains('@') {
        return Err(LocationError::Credentials);
    }
    let endpoint = format!("{scheme}://{}", host.to_ascii_lowercase());
    let uri: Uri = endpoint
        .parse()
        .map_err(|error: http::uri::InvalidUri| LocationError::Malformed(error.to_string()))?;
    if uri.host().is_none_or(str::is_empty) {
        return Err(LocationError::Missing {
            what: "the host",
            form: "HOST or HOST:PORT",
        });
    }
    Ok(endpoint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(address: &str) -> String {
        match Location::parse(address) {
            Ok(location) => location.to_string(),
            Err(error) => format!("error: {error}"),
        }
    }

    #[test]
    fn addresses_are_read_as_triton_reads_them() {
        assert_eq!(
            Location::parse("s3://bucket/models/prod/").unwrap(),
            Location::S3 {
                endpoint: None,
                bucket: "bucket".into(),
                prefix: "models/prod".into()
            }
        );
        for (given, meant) in [
            ("s3://bucket", "s3://bucket"),
            ("s3://https://Host:9000/b/p", "s3://https://host:9000/b/p"),
            ("s3://http://host:9000/b", "s3://http://host:9000/b"),
            ("s3://host:9000/b/p", "s3://http://host:9000/b/p"),
            ("gs://bucket/p", "gs://bucket/p"),
            ("as://account/container/p", "as://account/container/p"),
            (
                "as://account.blob.core.windows.net/container",
                "as://account/container",
            ),
            ("https://Models.example/a/b/", "https://models.example/a/b"),
        ] {
            assert_eq!(shown(given), meant, "{given}");
            assert_eq!(shown(meant), meant, "{meant}");
        }
    }

    #[test]
    fn addresses_that_lead_elsewhere_are_refused() {
        for (address, reason) in [
            ("ftp://host/x", "is not a kind of repository"),
            ("s3://", "bucket is missing"),
            ("as://account", "container is missing"),
            ("s3://b/../c", "'..'"),
            ("s3://b//c", "empty"),
            ("https://user:secret@host/x", "credentials come from"),
            ("s3://key:secret@b/x", "credentials come from"),
            ("https://host/x?sig=1", "a query"),
            ("https:///x", "not an address"),
        ] {
            assert!(
                shown(address).contains(reason),
                "{address}: {}",
                shown(address)
            );
        }
        assert!(!shown("https://user:secret@host/x").contains("secret"));
        assert!(!Location::is_address("/models"));
        assert!(!Location::is_address("C:/models"));
        assert!(Location::is_address("s3://x"));
    }

    #[test]
    fn only_what_is_allowed_is_reached() {
        let location = |address: &str| Location::parse(address).unwrap();
        let check = |address: &str, allowed: &[&str]| {
            let allowed: Vec<_> = allowed.iter().map(|address| location(address)).collect();
            location(address).check(&allowed)
        };
        assert_eq!(check("s3://b/models", &[]), Ok(()));
        assert_eq!(check("s3://b/models/x", &["s3://b/models"]), Ok(()));
        let refused = Err(LocationError::NotAllowed);
        assert_eq!(
            check("s3://b/models-of-others", &["s3://b/models"]),
            refused
        );
        assert_eq!(check("s3://https://h/b", &["s3://b"]), refused);
        assert_eq!(check("https://h:8443/x", &["https://h/x"]), refused);
        assert_eq!(check("http://127.0.0.1:80/x", &[]), Ok(()));
        assert_eq!(check("http://h/x", &[]), Err(LocationError::Plain));
        assert_eq!(check("http://h/x", &["http://h"]), Ok(()));
    }
}
