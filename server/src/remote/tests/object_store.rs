use super::*;

const KEY: &str = "models/m/1/model.onnx";

/// A bucket as S3 serves it, as far as listing and reading go.
fn bucket(site: &Site, request: &Request) -> Response {
    serve(site, request, |bytes| {
        let tag = tag(bytes);
        format!("<ETag>\"{tag}\"</ETag><LastModified>2026-01-02T03:04:05.000Z</LastModified>")
    })
}

/// As servers do that know an object's tag only once they have read it.
fn tagless_bucket(site: &Site, request: &Request) -> Response {
    serve(site, request, |_| {
        "<LastModified>2026-01-02T03:04:05.678Z</LastModified>".to_owned()
    })
}

fn serve(site: &Site, request: &Request, facts: impl Fn(&[u8]) -> String) -> Response {
    let files = site.files.lock();
    let path = request.uri().path().trim_start_matches("/bucket");
    if request
        .uri()
        .query()
        .is_some_and(|query| query.contains("list-type=2"))
    {
        let mut text = String::from("<ListBucketResult><IsTruncated>false</IsTruncated>");
        for (key, bytes) in &*files {
            text += &format!(
                "<Contents><Key>{key}</Key><Size>{}</Size>{}</Contents>",
                bytes.len(),
                facts(bytes)
            );
        }
        let body = text + "</ListBucketResult>";
        return Response::new(body.into());
    }
    let Some(bytes) = files.get(path.trim_start_matches('/')) else {
        return refuse(404);
    };
    let tag = format!("\"{}\"", tag(bytes));
    match request.headers().get("if-match") {
        Some(wanted) if wanted != tag.as_str() => refuse(412),
        _ => {
            let mut answer = send(bytes, request, &tag);
            let date = "Fri, 02 Jan 2026 03:04:05 GMT".parse().unwrap();
            answer.headers_mut().insert("last-modified", date);
            answer
        }
    }
}

/// Not an MD5 digest, as with objects of several parts.
fn tag(bytes: &[u8]) -> String {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    format!("{:x}-2", hasher.finish())
}

impl Remotes {
    /// Without credentials from the environment, which all tests share.
    fn unsigned(&self, address: &str) -> Arc<RemoteRepository> {
        let location = Location::parse(address).unwrap();
        let Location::S3 {
            endpoint: Some(endpoint),
            bucket,
            ..
        } = &location
        else {
            panic!("{location} has no endpoint");
        };
        let store = ::object_store::aws::AmazonS3Builder::new()
            .with_http_connector(self.transport(&location))
            .with_endpoint(endpoint)
            .with_bucket_name(bucket)
            .with_skip_signature(true)
            .with_retry(::object_store::RetryConfig {
                max_retries: 0,
                ..Default::default()
            });
        let bucket = Bucket::objects(Arc::new(store.build().unwrap()), &location);
        self.with_bucket(location, bucket.unwrap())
    }
}

fn open(fixture: &Fixture, remotes: &Remotes) -> Arc<RemoteRepository> {
    let address = format!("s3://http://{}/bucket/models", fixture.address);
    let repository = remotes.unsigned(&address);
    repository.refresh().unwrap();
    repository
}

#[test]
fn an_object_replaced_while_it_is_fetched_is_never_half_old_and_half_new() {
    let fixture = Fixture::new(|site, request| {
        let answer = bucket(site, request);
        let range = request
            .headers()
            .get("range")
            .and_then(|range| range.to_str().ok());
        // Replaced as soon as the second part is on its way.
        if range.is_some_and(|range| range.starts_with("bytes=65536-")) {
            let mut files = site.files.lock();
            files.insert(KEY.to_owned(), vec![2; 200 << 10]);
        }
        answer
    });
    fixture.put(KEY, vec![1; 200 << 10]);
    let remotes = fixture.remotes(|config| config.concurrency = 1);
    let repository = open(&fixture, &remotes);
    let file = file_of(&repository, "m/1/model.onnx");
    let error = repository.open(&file).unwrap_err();
    assert!(error.to_string().contains("412"), "{error}");
    // It was listed again meanwhile, and is fetched as it is now.
    let now = file_of(&repository, "m/1/model.onnx");
    assert_ne!(now, file);
    assert!(content(&repository.open(&now).unwrap()) == vec![2; 200 << 10]);
}

#[test]
fn an_object_that_is_listed_without_a_tag_is_known_by_its_time() {
    let fixture = Fixture::new(tagless_bucket);
    fixture.put(KEY, "abc");
    let remotes = fixture.remotes(|_| {});
    let repository = open(&fixture, &remotes);
    let file = file_of(&repository, "m/1/model.onnx");
    assert!(content(&repository.open(&file).unwrap()) == b"abc");
}

#[test]
fn markers_of_folders_hidden_objects_and_names_of_no_model_are_left_out() {
    let fixture = Fixture::new(bucket);
    fixture.put(KEY, "abc");
    for key in [
        "models/",
        "models/m/",
        "models/m/1/",
        "models/README.md",
        "models/.cache/x/1/model.onnx",
        "models/m/.git/config",
        "models-of-others/n/1/model.onnx",
    ] {
        fixture.put(key, "");
    }
    let remotes = fixture.remotes(|_| {});
    let repository = open(&fixture, &remotes);
    let listing = repository.listing();
    let paths: Vec<_> = listing.files().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["m/1/model.onnx"]);
}

#[test]
fn a_key_that_leads_out_is_told_and_nothing_is_listed() {
    let fixture = Fixture::new(bucket);
    fixture.put("models/../../secret/1/model.onnx", "abc");
    let remotes = fixture.remotes(|config| config.retries = 0);
    let repository = remotes.unsigned(&format!("s3://http://{}/bucket", fixture.address));
    let error = repository.refresh().unwrap_err();
    assert!(error.to_string().contains("invalid path"), "{error}");
}

#[test]
fn a_listing_that_never_ends_is_given_up() {
    let fixture = Fixture::new(|_, _| {
        let body = "<ListBucketResult><IsTruncated>true</IsTruncated>\
             <NextContinuationToken>more</NextContinuationToken></ListBucketResult>";
        // Each page takes a little while, so that they are not too many.
        let page = futures_util::stream::once(async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            Ok::<_, std::convert::Infallible>(bytes::Bytes::from_static(body.as_bytes()))
        });
        Response::new(axum::body::Body::from_stream(page))
    });
    let remotes = fixture.remotes(|config| config.listing = Duration::from_secs(3));
    let repository = remotes.unsigned(&format!("s3://http://{}/bucket", fixture.address));
    let error = repository.refresh().unwrap_err();
    assert!(error.to_string().contains("within 3s"), "{error}");
    assert!(fixture.asked("continuation-token=more") > 1);
}
