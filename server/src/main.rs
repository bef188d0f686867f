//! `dormouse`: see `dormouse --help`.

use dormouse_server::activation::Activation;
use dormouse_server::priority::ahead;
use dormouse_server::{cli, isolation, process};

fn main() -> ! {
    process::keep_engine_quiet();
    let activation = Activation::take();
    let invocation = cli::parse(std::env::args_os());
    if let cli::Command::Worker(args) = &invocation.command {
        // Before there is a second thread or a file of our own.
        isolation::inside::run(args)
    }
    match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .on_thread_park(ahead::before_wait)
        // Runs end on threads of their own. What they wake waits in a queue that is usually looked at
        // once in some sixty times: here every other time, so that answers are sent in turns with
        // taking more in, and not behind every connection that has something to read.
        .global_queue_interval(2)
        .build()
    {
        Ok(runtime) => {
            let code = runtime.block_on(cli::run_to_exit_code(invocation, activation));
            // A load may still be inside the engine: dropping the runtime would wait for it, and
            // running its destructors under it would crash.
            process::exit_now(code)
        }
        Err(error) => {
            eprintln!("error: cannot start the async runtime: {error}");
            process::exit_now(1)
        }
    }
}
