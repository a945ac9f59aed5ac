//! A request for completion as the gateway hands it to a worker, and as the journal's image keeps it.

use super::engine_message::{bytes, number};
use super::{Target, longer, seed};
use moonlivekv::node::convert::submitted;

pub const TARGET: Target = Target {
    name: "submit_request",
    run,
    outcomes: &[
        "accept",
        "grammar",
        "malformed",
        "prompt",
        "request",
        "sampling",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    match submitted(data) {
        Ok(spec) => {
            assert!(
                spec.stop
                    .stop_strings
                    .iter()
                    .map(String::len)
                    .sum::<usize>()
                    <= data.len()
            );
            "accept"
        }
        Err(bad) => match bad.field {
            "submit" => "malformed",
            "request" => "request",
            "prompt" => "prompt",
            "sampling" => "sampling",
            "sampling.grammar" => "grammar",
            other => panic!("an unknown field: {other}"),
        },
    }
}

fn seeds() -> Vec<super::Seed> {
    let id = bytes(1, "05".repeat(16).as_bytes());
    let text = bytes(3, &bytes(1, b"Once upon"));
    let sampling = |extra: Vec<u8>| bytes(4, &[number(9, 20), extra].concat());
    let whole = |prompt: Vec<u8>, extra: Vec<u8>| {
        [id.clone(), number(2, 3), prompt, sampling(extra)].concat()
    };
    let good = whole(text.clone(), vec![]);
    let message = [bytes(1, b"user"), bytes(2, b"hello")].concat();
    let chat = bytes(3, &bytes(3, &bytes(1, &message)));
    let full = [
        vec![0x0d, 0, 0, 0x80, 0x3f], // temperature 1.0
        number(2, 40),
        number(8, 7),
        bytes(12, b"stop here"),
        bytes(13, &number(1, 5)),
        number(15, 1),
    ]
    .concat();
    let bad_id = [bytes(1, b"xyz"), text.clone(), sampling(vec![])].concat();
    vec![
        seed("accept.text", good.clone()),
        seed(
            "accept.tokens",
            whole(bytes(3, &bytes(2, &bytes(1, &[5, 6]))), vec![]),
        ),
        seed("accept.chat", whole(chat, full)),
        seed(
            "accept.seeded",
            whole(bytes(3, &bytes(4, &number(1, 9))), vec![]),
        ),
        seed(
            "accept.json",
            whole(text.clone(), bytes(14, b"json_object")),
        ),
        seed(
            "accept.regex",
            whole(text.clone(), bytes(14, b"regex:[a-z]+")),
        ),
        seed("grammar", whole(text.clone(), bytes(14, b"bnf"))),
        seed("request.text", bad_id),
        seed("request.nothing", []),
        seed("prompt.missing", [&id[..], &sampling(vec![])].concat()),
        seed("prompt.no-kind", whole(bytes(3, &[]), vec![])),
        seed("sampling", [&id[..], &text].concat()),
        seed("malformed.longer", longer(&good)),
        seed("malformed.text", [&good[..], &bytes(1, &[0xff])].concat()),
    ]
}
