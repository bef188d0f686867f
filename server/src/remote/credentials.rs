//! Opens object stores with what the environment says, in the names that the clouds' own tools and
//! Triton use.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{ObjectStore, RetryConfig};
use serde::Deserialize;

use super::error::{ErrorKind, RemoteError, printable};
use super::location::Location;
use super::transport::Transport;

/// Triton's file of credentials for several buckets.
const TRITON_FILE: &str = "TRITON_CLOUD_CREDENTIAL_PATH";
const MAX_FILE: u64 = 1 << 20;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TritonFile {
    s3: BTreeMap<String, S3Credentials>,
    gs: BTreeMap<String, String>,
    r#as: BTreeMap<String, AzureCredentials>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct S3Credentials {
    key_id: String,
    secret_key: String,
    session_token: String,
    region: String,
    profile: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct AzureCredentials {
    account_str: String,
    account_key: String,
}

/// Opens the bucket of an address; nothing is sent yet. None for a web server.
pub(super) fn open(
    location: &Location,
    transport: &Transport,
) -> Result<Option<Arc<dyn ObjectStore>>, RemoteError> {
    let file = triton_file()?;
    // Requests are tried again by whoever knows what they are for.
    let retry = RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    };
    let unusable = |error: object_store::Error| {
        RemoteError::new(
            ErrorKind::Denied,
            format!(
                "the settings for {location} cannot be used: {}",
                printable(&error.to_string())
            ),
        )
    };
    Ok(Some(match location {
        Location::S3 {
            endpoint, bucket, ..
        } => {
            let mut builder = AmazonS3Builder::from_env()
                .with_http_connector(transport.clone())
                .with_bucket_name(bucket)
                .with_retry(retry);
            if let Some(endpoint) = endpoint {
                let key = "aws_endpoint_url_s3".parse().map_err(unusable)?;
                builder = builder
                    .with_config(key, endpoint)
                    .with_virtual_hosted_style_request(false);
            }
            if let Some(given) = matching(&file.s3, location) {
                if !given.profile.is_empty() {
                    tracing::warn!(
                        "{TRITON_FILE}: profiles are not read; name key_id and secret_key"
                    );
                }
                for (value, set) in [
                    (
                        &given.key_id,
                        AmazonS3Builder::with_access_key_id as S3Setter,
                    ),
                    (&given.secret_key, AmazonS3Builder::with_secret_access_key),
                    (&given.session_token, AmazonS3Builder::with_token),
                    (&given.region, AmazonS3Builder::with_region),
                ] {
                    if !value.is_empty() {
                        builder = set(builder, value.clone());
                    }
                }
            }
            Arc::new(builder.build().map_err(unusable)?)
        }
        Location::Google { bucket, .. } => {
            let mut builder = GoogleCloudStorageBuilder::from_env()
                .with_http_connector(transport.clone())
                .with_bucket_name(bucket)
                .with_retry(retry);
            // What Google's own libraries call an emulator; it knows no credentials.
            if let Some(host) = variable("STORAGE_EMULATOR_HOST") {
                let base = match host.contains("://") {
                    true => host,
                    false => format!("http://{host}"),
                };
                builder = builder.with_base_url(&base).with_skip_signature(true);
            }
            if let Some(path) = matching(&file.gs, location).filter(|path| !path.is_empty()) {
                builder = builder.with_application_credentials(path);
            }
            Arc::new(builder.build().map_err(unusable)?)
        }
        Location::Azure {
            account, container, ..
        } => {
            let mut builder = MicrosoftAzureBuilder::from_env()
                .with_http_connector(transport.clone())
                .with_account(account)
                .with_container_name(container)
                .with_retry(retry);
            let same = variable("AZURE_STORAGE_ACCOUNT").is_none_or(|given| given == *account);
            if let Some(key) = variable("AZURE_STORAGE_KEY").filter(|_| same) {
                builder = builder.with_access_key(key);
            }
            if let Some(given) = matching(&file.r#as, location) {
                if !given.account_str.is_empty() {
                    builder = builder.with_account(&given.account_str);
                }
                if !given.account_key.is_empty() {
                    builder = builder.with_access_key(&given.account_key);
                }
            }
            Arc::new(builder.build().map_err(unusable)?)
        }
        Location::Web { .. } => return Ok(None),
    }))
}

type S3Setter = fn(AmazonS3Builder, String) -> AmazonS3Builder;

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn triton_file() -> Result<TritonFile, RemoteError> {
    let Some(path) = variable(TRITON_FILE) else {
        return Ok(TritonFile::default());
    };
    read_triton_file(Path::new(&path))
}

fn read_triton_file(path: &Path) -> Result<TritonFile, RemoteError> {
    let unusable = |why: String| {
        RemoteError::new(
            ErrorKind::Denied,
            format!("the file of {TRITON_FILE} cannot be used: {why}"),
        )
    };
    let metadata = std::fs::metadata(path).map_err(|error| unusable(error.to_string()))?;
    if metadata.len() > MAX_FILE {
        return Err(unusable(format!("it is larger than {MAX_FILE} bytes")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
    // The parser's message may repeat a secret; where it is wrong says enough.
    serde_json::from_str(&text).map_err(|error| {
        unusable(format!(
            "it is not as expected at line {} column {}",
            error.line(),
            error.column()
        ))
    })
}

/// The entry whose address is the longest that the repository lies in; "" fits all.
fn matching<'a, T>(entries: &'a BTreeMap<String, T>, location: &Location) -> Option<&'a T> {
    let fits = |address: &str| {
        address.is_empty() || Location::parse(address).is_ok_and(|entry| location.is_within(&entry))
    };
    let fitting = entries.iter().filter(|(address, _)| fits(address));
    fitting
        .max_by_key(|(address, _)| address.len())
        .map(|(_, entry)| entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_entry_of_tritons_file_counts() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            r#"{"gs": {"": "/a.json", "gs://b": "/b.json", "gs://b/deep": "/c.json"},
                "s3": {"": {"key_id": "k", "secret_key": "s"}},
                "as": {"as://acc/cont": {"account_str": "acc", "account_key": "x"}}}"#,
        )
        .unwrap();
        let file = read_triton_file(file.path()).unwrap();
        let gs = |address| matching(&file.gs, &Location::parse(address).unwrap()).unwrap();
        assert_eq!(gs("gs://other/x"), "/a.json");
        assert_eq!(gs("gs://b/x"), "/b.json");
        assert_eq!(gs("gs://b/deep/x"), "/c.json");
        let s3 = matching(&file.s3, &Location::parse("s3://any/x").unwrap());
        assert_eq!(s3.unwrap().key_id, "k");
        let other = Location::parse("as://acc/other").unwrap();
        assert!(matching(&file.r#as, &other).is_none());
    }

    #[test]
    fn a_broken_file_of_credentials_is_told_without_its_content() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), r#"{"s3": {"": {"secret_key": ["hunter2"]}}}"#).unwrap();
        let error = read_triton_file(file.path()).unwrap_err();
        assert!(!error.to_string().contains("hunter2"));
        assert!(error.to_string().contains("line 1"), "{error}");
    }
}
