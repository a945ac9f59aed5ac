//! One JSON object, byte by byte: a pushdown automaton of bounded depth.

/// Deepest nesting.
const MAX_DEPTH: u8 = 64;
/// Most white space in a row, so that a model cannot dither for ever.
const MAX_SPACE: u8 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Before the object.
    Start,
    /// A value must follow.
    Value,
    /// After `[`: a value or the end.
    FirstElement,
    /// After `{`: a key or the end.
    FirstKey,
    /// After a comma in an object.
    Key,
    Colon,
    AfterValue,
    Text {
        key: bool,
    },
    Escape {
        key: bool,
    },
    Hex {
        key: bool,
        left: u8,
    },
    /// Inside a character: bytes left, and the bounds of the next.
    Utf8 {
        key: bool,
        left: u8,
        low: u8,
        high: u8,
    },
    Literal {
        rest: &'static [u8],
    },
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
    Done,
}

/// Where in the object we are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Json {
    mode: Mode,
    /// Bit d: level d is an object.
    objects: u64,
    depth: u8,
    space: u8,
}

impl Json {
    pub(super) fn start() -> Self {
        Self {
            mode: Mode::Start,
            objects: 0,
            depth: 0,
            space: 0,
        }
    }

    pub(super) fn complete(&self) -> bool {
        self.mode == Mode::Done
    }

    /// Moves past a byte; false if none may stand here.
    pub(super) fn push(&mut self, b: u8) -> bool {
        if matches!(b, b' ' | b'\n' | b'\t' | b'\r') && self.between_tokens() {
            self.space += 1;
            if self.is_number() {
                self.mode = Mode::AfterValue;
            }
            return self.space <= MAX_SPACE;
        }
        self.space = 0;
        match self.step(b) {
            Some(mode) => {
                self.mode = mode;
                true
            }
            None => false,
        }
    }

    fn is_number(&self) -> bool {
        matches!(
            self.mode,
            Mode::Zero | Mode::Digits | Mode::Fraction | Mode::ExponentDigits
        )
    }

    fn between_tokens(&self) -> bool {
        self.is_number()
            || matches!(
                self.mode,
                Mode::Value
                    | Mode::FirstElement
                    | Mode::FirstKey
                    | Mode::Key
                    | Mode::Colon
                    | Mode::AfterValue
            )
    }

    fn in_object(&self) -> bool {
        self.depth > 0 && self.objects >> (self.depth - 1) & 1 == 1
    }

    fn open(&mut self, object: bool) -> Option<Mode> {
        if self.depth == MAX_DEPTH {
            return None;
        }
        let bit = 1 << self.depth;
        self.objects = if object {
            self.objects | bit
        } else {
            self.objects & !bit
        };
        self.depth += 1;
        Some(if object {
            Mode::FirstKey
        } else {
            Mode::FirstElement
        })
    }

    fn close(&mut self, object: bool) -> Option<Mode> {
        if self.depth == 0 || self.in_object() != object {
            return None;
        }
        self.depth -= 1;
        self.objects &= !(1 << self.depth);
        Some(if self.depth == 0 {
            Mode::Done
        } else {
            Mode::AfterValue
        })
    }

    fn value(&mut self, b: u8) -> Option<Mode> {
        match b {
            b'{' => self.open(true),
            b'[' => self.open(false),
            b'"' => Some(Mode::Text { key: false }),
            b't' => Some(Mode::Literal { rest: b"rue" }),
            b'f' => Some(Mode::Literal { rest: b"alse" }),
            b'n' => Some(Mode::Literal { rest: b"ull" }),
            b'-' => Some(Mode::Minus),
            b'0' => Some(Mode::Zero),
            b'1'..=b'9' => Some(Mode::Digits),
            _ => None,
        }
    }

    fn after_value(&mut self, b: u8) -> Option<Mode> {
        match b {
            b',' if self.in_object() => Some(Mode::Key),
            b',' => Some(Mode::Value),
            b'}' => self.close(true),
            b']' => self.close(false),
            _ => None,
        }
    }

    fn step(&mut self, b: u8) -> Option<Mode> {
        match self.mode {
            Mode::Start => (b == b'{').then(|| self.open(true)).flatten(),
            Mode::Value => self.value(b),
            Mode::FirstElement if b == b']' => self.close(false),
            Mode::FirstElement => self.value(b),
            Mode::FirstKey if b == b'}' => self.close(true),
            Mode::FirstKey | Mode::Key => (b == b'"').then_some(Mode::Text { key: true }),
            Mode::Colon => (b == b':').then_some(Mode::Value),
            Mode::AfterValue => self.after_value(b),
            Mode::Text { key } => text(key, b),
            Mode::Escape { key } => match b {
                b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(Mode::Text { key }),
                b'u' => Some(Mode::Hex { key, left: 4 }),
                _ => None,
            },
            Mode::Hex { key, left } => b.is_ascii_hexdigit().then_some(if left == 1 {
                Mode::Text { key }
            } else {
                Mode::Hex {
                    key,
                    left: left - 1,
                }
            }),
            Mode::Utf8 {
                key,
                left,
                low,
                high,
            } => (low..=high).contains(&b).then_some(if left == 1 {
                Mode::Text { key }
            } else {
                Mode::Utf8 {
                    key,
                    left: left - 1,
                    low: 0x80,
                    high: 0xbf,
                }
            }),
            Mode::Literal { rest } => match rest.split_first() {
                Some((first, [])) => (b == *first).then_some(Mode::AfterValue),
                Some((first, rest)) => (b == *first).then_some(Mode::Literal { rest }),
                None => None,
            },
            Mode::Minus => match b {
                b'0' => Some(Mode::Zero),
                b'1'..=b'9' => Some(Mode::Digits),
                _ => None,
            },
            Mode::Zero | Mode::Digits | Mode::Fraction | Mode::ExponentDigits => self.number(b),
            Mode::Point => b.is_ascii_digit().then_some(Mode::Fraction),
            Mode::Exponent if matches!(b, b'+' | b'-') => Some(Mode::ExponentSign),
            Mode::Exponent | Mode::ExponentSign => {
                b.is_ascii_digit().then_some(Mode::ExponentDigits)
            }
            Mode::Done => None,
        }
    }

    fn number(&mut self, b: u8) -> Option<Mode> {
        match (self.mode, b) {
            (Mode::Digits | Mode::Fraction | Mode::ExponentDigits, b'0'..=b'9') => Some(self.mode),
            (Mode::Zero | Mode::Digits, b'.') => Some(Mode::Point),
            (Mode::Zero | Mode::Digits | Mode::Fraction, b'e' | b'E') => Some(Mode::Exponent),
            _ => self.after_value(b),
        }
    }
}

fn text(key: bool, b: u8) -> Option<Mode> {
    let utf8 = |left, low, high| {
        Some(Mode::Utf8 {
            key,
            left,
            low,
            high,
        })
    };
    match b {
        b'"' if key => Some(Mode::Colon),
        b'"' => Some(Mode::AfterValue),
        b'\\' => Some(Mode::Escape { key }),
        0x20..=0x7f => Some(Mode::Text { key }),
        0xc2..=0xdf => utf8(1, 0x80, 0xbf),
        0xe0 => utf8(2, 0xa0, 0xbf),
        0xed => utf8(2, 0x80, 0x9f),
        0xe1..=0xef => utf8(2, 0x80, 0xbf),
        0xf0 => utf8(3, 0x90, 0xbf),
        0xf1..=0xf3 => utf8(3, 0x80, 0xbf),
        0xf4 => utf8(3, 0x80, 0x8f),
        _ => None,
    }
}
