#![no_main]

#[global_allocator]
static ALLOCATOR: dormouse_server::fuzz::Counting = dormouse_server::fuzz::Counting;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    dormouse_server::fuzz::run("safetensors", data);
});
