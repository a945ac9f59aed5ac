//! What daemons send each other around the protocol's messages. The first byte chooses the kind.

use super::route_record::{OUTCOMES, label, worker};
use super::{Target, longer, patched, seed, shorter};
use moonlivekv::control_state::{Fingerprint, RngKind};
use moonlivekv::drive::Hello;
use moonlivekv::gateway::image::{Checkpoint, Image};
use moonlivekv::id::{MigrationEpoch, OwnerEpoch};
use moonlivekv::mem::{RegionKey, RemoteRegion};
use moonlivekv::migrate::io::Peer;
use moonlivekv::migrate::msg::Emission;
use moonlivekv::node::bulk::Granted;
use moonlivekv::node::options::Options;
use moonlivekv::node::parcels::{OfferParcel, PushParcel};
use moonlivekv::node::spec::{SourcePool, SourceSpec};
use moonlivekv::node::worker::read_ahead;
use moonlivekv::page::{BlockLayout, Dtype, GroupGeometry, ObjectSetHeader, Plane, Scheme, Shard};
use moonlivekv::route::{DecodeError, Writer};
use moonlivekv::rpc::v1;
use moonlivekv::transport::Path;
use std::sync::Arc;

pub const TARGET: Target = Target {
    name: "daemon_payload",
    run,
    outcomes: OUTCOMES,
    seeds,
};

const HELLO: u8 = 0;
const OFFER: u8 = 1;
const PUSH: u8 = 2;
const SPEC: u8 = 3;
const OPTIONS: u8 = 4;
const GRANT: u8 = 5;
const IMAGE: u8 = 6;
const CHECKPOINT: u8 = 7;
const AHEAD: u8 = 8;

fn run(data: &[u8]) -> &'static str {
    let Some((kind, bytes)) = data.split_first() else {
        return "truncated";
    };
    match again(kind % 9, bytes) {
        Ok(Some(encoded)) => {
            assert_eq!(encoded, bytes, "a second spelling was accepted");
            "accept"
        }
        Ok(None) => "accept",
        Err(e) => label(&e),
    }
}

/// Decodes, and encodes what was accepted; `None` where one thing has several spellings.
fn again(kind: u8, bytes: &[u8]) -> Result<Option<Vec<u8>>, DecodeError> {
    Ok(match kind {
        HELLO => {
            let hello = Hello::decode(bytes)?;
            // An address can be written in several ways.
            assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
            None
        }
        OFFER => Some(OfferParcel::decode(bytes)?.encode()),
        PUSH => {
            let (push, tail) = PushParcel::decode(bytes)?;
            Some([push.encode(), tail.to_vec()].concat())
        }
        SPEC => Some(SourceSpec::decode(bytes)?.encode()),
        OPTIONS => Some(Options::decode(bytes)?.encode()),
        GRANT => {
            Granted::decode(bytes)?;
            None
        }
        IMAGE => {
            let image = Image::decode(bytes)?;
            assert!((1..).zip(&image.tokens).all(|(seq, t)| t.seq == seq));
            // Protocol buffers have several spellings, and a float in one may be no number.
            let once = image.encode();
            let twice = Image::decode(&once).expect("what was accepted").encode();
            assert_eq!(once, twice);
            None
        }
        CHECKPOINT => Some(Checkpoint::decode(bytes)?.encode()),
        _ => {
            let (request, epoch, tokens, slots) = read_ahead(bytes)?;
            assert!((1..=64).contains(&(tokens.end - tokens.start)));
            let numbers = [epoch.0, tokens.start, tokens.end].map(u64::to_le_bytes);
            Some([&request.0[..], &numbers.concat(), slots].concat())
        }
    })
}

fn spec() -> SourceSpec {
    let geometry = GroupGeometry::attention(0, [0, 2], 1, 8, Dtype::F16).expect("valid");
    let header = ObjectSetHeader::new([9; 32], vec![geometry.clone()], 16, Scheme::Blake3Leaves);
    let plane = |n: u64| Plane {
        base: n * 1024,
        block_stride: 256,
        slot_stride: 16,
        head_stride: 16,
    };
    let layout = BlockLayout::from_planes(
        Arc::new(geometry),
        Shard {
            layers: vec![0, 2],
            heads: vec![0],
        },
        4,
        16,
        (0..4).map(plane).collect(),
        4096,
    );
    SourceSpec {
        header: header.expect("valid"),
        fingerprint: Fingerprint {
            engine_build: [1; 32],
            numerics_profile: [2; 32],
        },
        rng: RngKind::Counter,
        prompt_tokens: 20,
        max_tokens: 90,
        first_live: vec![(0, 0)],
        pools: vec![SourcePool {
            group: 0,
            layout: Arc::new(layout.expect("valid")),
            grant: grant(),
        }],
        options: Options::default(),
    }
}

fn grant() -> Vec<u8> {
    let region = RemoteRegion {
        key: RegionKey::from_bytes([5; 16]),
        base: 0,
        epoch: 3,
        len: 4096,
    };
    let mut w = Writer::default();
    w.bytes(b"tcp:127.0.0.1:4711");
    w.bytes(&region.encode());
    w.0
}

fn seeds() -> Vec<super::Seed> {
    let of = |kind: u8, bytes: &[u8]| [&[kind], bytes].concat();
    let hello = Hello {
        from: Peer::Worker(worker("w1")),
        to: Some(Peer::Gateway),
        endpoints: vec![
            ("mesh".into(), "tcp://127.0.0.1:7".parse().expect("valid")),
            ("rpc".into(), "unix:///run/x".parse().expect("valid")),
        ],
    };
    let hello = of(HELLO, &hello.encode());
    let coordinator = Hello {
        from: Peer::Coordinator(7),
        to: None,
        endpoints: vec![],
    };
    let offer = OfferParcel {
        from: 32,
        tokens: vec![5, 6, 7],
        tables: vec![(0, vec![9, 1]), (3, vec![])],
    };
    let push = PushParcel {
        tokens_from: 4,
        tokens: vec![1, 2],
        owner_epoch: OwnerEpoch(3),
        control: vec![7; 9],
    };
    let options = Options {
        path: Path::Shm,
        verify_full: true,
        max_bytes_per_s: 7,
        null_handoff: false,
    };
    let checkpoint = Checkpoint {
        owner_epoch: OwnerEpoch(1),
        seal: 1,
        kv_len: 9,
        control: vec![1, 2, 3],
        set_digest: Some([7; 32]),
    };
    let token = |seq: u64, finish| Emission {
        seq,
        token: seq as u32 + 7,
        text: b"x".to_vec(),
        finish,
    };
    let image = Image {
        submit: v1::SubmitRequest {
            request: "ab".into(),
            owner_epoch: 3,
            ..Default::default()
        },
        epoch: MigrationEpoch(4),
        checkpoint: Some(checkpoint.clone()),
        tokens: vec![token(1, None), token(2, Some(1))],
    };
    let (offer, push) = (of(OFFER, &offer.encode()), of(PUSH, &push.encode()));
    let spec = of(SPEC, &spec().encode());
    let (options, grant) = (of(OPTIONS, &options.encode()), of(GRANT, &grant()));
    let image = of(IMAGE, &image.encode());
    let point = of(CHECKPOINT, &checkpoint.encode());
    let ahead = |from: u64, to: u64| {
        let numbers = [4, from, to].map(u64::to_le_bytes).concat();
        of(AHEAD, &[&[5; 16][..], &numbers, b"slots"].concat())
    };
    vec![
        seed("accept.hello", hello.clone()),
        seed("accept.hello-coordinator", of(HELLO, &coordinator.encode())),
        seed("accept.offer", offer.clone()),
        seed("accept.push", [&push[..], b"slots of the tail"].concat()),
        seed("accept.spec", spec.clone()),
        seed("accept.options", options.clone()),
        seed("accept.grant", grant.clone()),
        seed("accept.image", image.clone()),
        seed("accept.checkpoint", point.clone()),
        seed("accept.ahead", ahead(40, 41)),
        seed("range.ahead-none", ahead(40, 40)),
        seed("range.ahead-many", ahead(0, u64::MAX)),
        seed("range.ahead-backwards", ahead(41, 40)),
        seed("truncated.ahead", ahead(40, 41)[..40].to_vec()),
        seed("version.hello", patched(&hello, 1, b"MLH9")),
        seed("version.spec", patched(&spec, 1, b"MLS9")),
        seed("version.image", patched(&image, 1, b"MLJ9")),
        seed("name.hello", patched(&hello, 6, &[0])),
        seed("range.hello-peer", patched(&hello, 5, &[3])),
        seed(
            "range.hello-endpoint",
            patched(&hello, hello.len() - 13, b"x"),
        ),
        seed("range.options", patched(&options, 1, &[3])),
        seed("range.grant", patched(&grant, 5, b"x")),
        seed("range.spec-header", patched(&spec, 9, b"x")),
        seed("range.image-submit", patched(&image, 9, &[0xff; 4])),
        seed("truncated.offer-count", patched(&offer, 9, &[0xff; 2])),
        seed("truncated.push", push[..push.len() - 1].to_vec()),
        seed("truncated.spec", shorter(&spec)),
        seed("truncated.image-tokens", shorter(&image)),
        seed("truncated.nothing", []),
        seed("trailing.hello", longer(&hello)),
        seed("trailing.offer", longer(&offer)),
        seed("trailing.spec", longer(&spec)),
        seed("trailing.grant", longer(&grant)),
        seed("trailing.image", longer(&image)),
        seed("trailing.checkpoint", longer(&point)),
    ]
}
