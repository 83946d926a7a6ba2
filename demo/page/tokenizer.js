// From a text to the ids that kiloword's own vocabularies, and BERT's, give it, by the files of `kiloword export onnx`.

// What Python's str.split() separates by. JavaScript's \s has U+FEFF in addition, and lacks some control characters.
const SPACES = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/u;
const LONGEST = 100; // letters of a word of BERT's
const CJK = /[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u{20000}-\u{2a6df}\u{2a700}-\u{2ceaf}\u{2f800}-\u{2fa1f}]/gu;
// GPT-2's words. White space is single spaces by then.
const WORDS = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^ \p{L}\p{N}]+| +/gu;

/** A byte-level BPE or BERT's WordPiece, read from tokenizer.json and tokenizer_config.json. */
export class Tokenizer {
  /** Throws an Error that says what differs, for a tokenizer of another kind. */
  constructor(document, config) {
    this.tokens = kindOf(document) === "BPE" ? this.symbols : this.pieces;
    const { vocab, merges = [], unk_token: unknown } = document.model;
    this.vocab = new Map(Object.entries(vocab));
    this.unknown = this.vocab.get(unknown);
    this.ranks = new Map(merges.map(([a, b], rank) => [`${a} ${b}`, rank]));
    const { single, special_tokens: special } = document.post_processor;
    const place = single.findIndex((part) => part.Sequence);
    const ids = (parts) => parts.flatMap((part) => special[part.SpecialToken.id].ids);
    this.before = ids(single.slice(0, place));
    this.after = ids(single.slice(place + 1));
    this.room = config.model_max_length - this.before.length - this.after.length;
  }

  /** Ids with the special ones, and the number of tokens of the text, of which the ids hold the first `room`. */
  encode(text) {
    const tokens = this.tokens(encodable(text));
    return { ids: [...this.before, ...tokens.slice(0, this.room), ...this.after], tokens: tokens.length };
  }

  symbols(text) {
    return words(text).flatMap((word) => this.merged(byteSymbols(word)).map((symbol) => this.vocab.get(symbol)));
  }

  /** Of each word the longest beginning in the vocabulary, then the longest that continues it; or one unknown token. */
  pieces(text) {
    return bertWords(text).flatMap((word) => {
      const letters = Array.from(word);
      const found = [];
      for (let start = 0; start < letters.length; ) {
        let end = letters.length;
        const piece = () => this.vocab.get((start ? "##" : "") + letters.slice(start, end).join(""));
        while (end > start && piece() === undefined) end--;
        if (end === start || letters.length > LONGEST) return [this.unknown];
        found.push(piece());
        start = end;
      }
      return found;
    });
  }

  /** The pair of the lowest rank is joined, the leftmost first, until none has a rank. */
  merged(symbols) {
    while (true) {
      let [best, at] = [Infinity, -1];
      for (let n = 0; n + 1 < symbols.length; n++) {
        const rank = this.ranks.get(`${symbols[n]} ${symbols[n + 1]}`) ?? Infinity;
        if (rank < best) [best, at] = [rank, n];
      }
      if (at < 0) return symbols;
      symbols.splice(at, 2, symbols[at] + symbols[at + 1]);
    }
  }
}

/** Without lone surrogates: with u, pairs are one letter. */
function encodable(text) {
  return text.replace(/[\ud800-\udfff]/gu, "?");
}

/** As BERT's normalizer cleans and its pre-tokenizer splits: lower case without accents, punctuation and CJK apart. */
function bertWords(text) {
  const clean = text.replace(/[\t\n\r]/g, " ").replace(/[\0\ufffd\p{Cc}\p{Cf}\p{Co}]/gu, "").replace(/\p{White_Space}/gu, " ");
  const apart = clean.replace(CJK, " $& ").normalize("NFD").replace(/\p{Mn}/gu, "");
  const lower = Array.from(apart, (letter) => letter.toLowerCase()).join("");
  return lower.match(/[!-/:-@[-`{-~\p{P}]|[^ !-/:-@[-`{-~\p{P}]+/gu) ?? [];
}

/** Cleaned and split: one space between words, composed letters, lower case, letters and digits apart. */
function words(text) {
  const clean = text.split(SPACES).filter(Boolean).join(" ").normalize("NFC");
  // letter by letter, as the vocabulary was trained: a whole text would turn a last sigma into another letter
  const lower = Array.from(clean, (letter) => letter.toLowerCase()).join("");
  return lower ? ` ${lower}`.match(WORDS) : [];
}

/** The letters that stand for the bytes of a word, as GPT-2 writes them: printable bytes as they are, others from 256 on. */
function byteSymbols(word) {
  return Array.from(new TextEncoder().encode(word), (byte) => SYMBOLS[byte]);
}

const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
let shifted = 256;
const SYMBOLS = Array.from({ length: 256 }, (_, byte) => String.fromCharCode(printable(byte) ? byte : shifted++));

/** "BPE" or "WordPiece". */
function kindOf({ model, normalizer, pre_tokenizer: split }) {
  const steps = normalizer?.normalizers?.map((step) => step.type).join(", ");
  const { clean_text: clean, handle_chinese_chars: cjk, strip_accents: accents, lowercase } = normalizer ?? {};
  const bert = split?.type === "BertPreTokenizer" && clean && cjk && lowercase && accents !== false;
  if (model?.type === "WordPiece" && model.continuing_subword_prefix === "##" && bert) return "WordPiece";
  const known =
    model?.type === "BPE" &&
    !model.end_of_word_suffix &&
    steps === "Replace, Strip, Sequence" &&
    split?.type === "ByteLevel" &&
    split.add_prefix_space;
  if (!known) throw new Error("tokenizer.json is neither of kiloword's own vocabularies nor of BERT's, which this page reads.");
  return "BPE";
}
