mod mutate;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use self::mutate::{Form, Mutator, dictionary};
use super::*;

/// Everything in this program is counted; only targets look at the figures.
#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Mutations of a target, where the environment asks for other than a short run has.
const RUNS_VARIABLE: &str = "DORMOUSE_FUZZ_RUNS";
/// Another seed is another run; the same one is the same run.
const SEED_VARIABLE: &str = "DORMOUSE_FUZZ_SEED";
/// Accepted mutations that are mutated further.
const KEPT: usize = 256;
/// Longer inputs only take longer.
const LONGEST: usize = 8 << 10;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

/// The kept inputs of a target, in the order of their names.
fn corpus(target: &Target) -> Vec<(String, Vec<u8>)> {
    let folder = folder().join("corpus").join(target.name);
    let mut files = BTreeSet::new();
    for entry in std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}")) {
        files.insert(entry.unwrap().path());
    }
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    let read = |path: PathBuf| (name(&path), std::fs::read(&path).unwrap());
    files.into_iter().map(read).collect()
}

fn number(variable: &str, default: usize) -> usize {
    match std::env::var(variable) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{variable} is {text}")),
        Err(_) => default,
    }
}

/// Runs one input; one that fails is written to a file that can be kept in the corpus.
fn run_one(target: &Target, data: &[u8]) -> bool {
    let result = catch_unwind(AssertUnwindSafe(|| (target.run)(data)));
    result.unwrap_or_else(|panic| {
        let name = format!("dormouse-{}-{}", target.name, blake3::hash(data).to_hex());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, data).unwrap();
        eprintln!("{} fails for {}", target.name, path.display());
        resume_unwind(panic)
    })
}

/// The corpus of a target, then mutations of it. Inputs whose names begin with `ok` are taken by
/// the code they are for, those that begin with `no` are refused.
fn short_run(name: &str, form: Form, runs: usize) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let mut pool = Vec::new();
    let mut accepted = 0;
    for (file, data) in corpus(target) {
        let taken = run_one(target, &data);
        assert!(taken || !file.starts_with("ok"), "{name}/{file} is refused");
        assert!(!taken || !file.starts_with("no"), "{name}/{file} is taken");
        accepted += usize::from(taken);
        pool.push(data);
    }
    assert!(
        accepted > 0 && accepted < pool.len(),
        "the corpus has both kinds"
    );

    let dictionary = dictionary(&folder().join("dictionaries").join(format!("{name}.dict")));
    let mut mutator = Mutator::new(number(SEED_VARIABLE, 1) as u64, form, dictionary);
    let kept = pool.len();
    let runs = number(RUNS_VARIABLE, runs);
    accepted = 0;
    for _ in 0..runs {
        let mut data = mutator.next(&pool);
        data.truncate(LONGEST);
        if run_one(target, &data) {
            accepted += 1;
            match pool.len() < kept + KEPT {
                true => pool.push(data),
                false => pool[kept + accepted % KEPT] = data,
            }
        }
    }
    // A mutator whose inputs are all refused at the first byte would find nothing behind it.
    assert!(accepted * 50 > runs, "{accepted} of {runs} were taken");
}

#[test]
fn grpc_requests_are_read_or_refused() {
    short_run("grpc_infer", Form::Protobuf, 3_000);
}

#[test]
fn http_json_is_read_or_refused() {
    short_run("http_json", Form::Text, 3_000);
}

#[test]
fn http_bodies_with_a_binary_tail_are_read_or_refused() {
    short_run("http_binary", Form::SizedText { prefix: 2 }, 3_000);
}

#[test]
fn tensors_of_strings_are_read_or_refused() {
    short_run("bytes_tensor", Form::Plain, 4_000);
}

#[test]
fn configurations_are_read_or_refused() {
    short_run("config_pbtxt", Form::Text, 500);
}

#[test]
fn safetensors_headers_are_read_or_refused() {
    short_run("safetensors", Form::SizedText { prefix: 8 }, 6_000);
}

#[test]
fn onnx_files_are_read_or_refused() {
    short_run("onnx", Form::Protobuf, 4_000);
}

#[test]
fn messages_of_workers_are_read_or_refused() {
    short_run("worker", Form::Plain, 6_000);
}

#[test]
fn every_target_has_its_binary_its_corpus_and_its_dictionary() {
    let manifest = std::fs::read_to_string(folder().join("Cargo.toml")).unwrap();
    for target in TARGETS {
        let name = target.name;
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        assert!(
            folder().join(format!("fuzz_targets/{name}.rs")).is_file(),
            "{name}"
        );
        assert!(
            folder().join(format!("dictionaries/{name}.dict")).is_file(),
            "{name}"
        );
        let files = corpus(target);
        assert!(
            (4..64).contains(&files.len()),
            "{name} has {} inputs",
            files.len()
        );
        for (file, data) in files {
            assert!(
                data.len() <= LONGEST,
                "{name}/{file} has {} bytes",
                data.len()
            );
        }
    }
}

#[test]
fn what_is_allocated_out_of_proportion_is_noticed() {
    let within = |bytes| allocations::within(bytes, || drop(vec![1u8; 1000]));
    within(1000);
    assert!(catch_unwind(|| within(999)).is_err());
}
