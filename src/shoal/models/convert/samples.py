"""Sample texts and pairs for comparing an engine's lower precision with float32 before `auto` selects it.

TEXTS are as varied as user input: from one word to the model's longest input, prose, questions, code, numbers, lists,
markup, capitals, many languages and scripts. Sentence pairs are similar within groups, so that a precision which
changes the order of near neighbors is detected; passages made of them are longer. Changing the samples changes the
check: results for other samples are not used.
"""

# ruff: noqa: RUF001  # words of other languages are meant

from __future__ import annotations

from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

TEXTS = (
    "A",
    "ok",
    "42",
    "?",
    "HELP",
    "Tokyo",
    "thank you",
    "Bonjour",
    "harbour pilot",
    "¿Por qué no?",
    "rain, then sun",
    "NOT FOR RESALE",
    "3.14159265",
    "https://example.org/a?b=1#c",
    "Is it raining?",
    "ERROR 504: upstream timed out",
    "Fish swim together.",
    "best soup near the station",
    "invoice #20931-B, due 2024-02-29",
    "where can i renew my passport",
    "How do I undo the last commit?",
    "The door was open, but nobody was in.",
    "The door was shut, and everybody was in.",
    "Two plus two is five, for large values of two.",
    "WARNING: DO NOT OPEN WHILE THE DRUM IS TURNING",
    "- flour\n- two eggs\n- a pinch of salt\n- 250 ml of milk",
    "for (int i = 0; i < n; ++i) sum += a[i] * b[i];",
    "SELECT name, SUM(price) FROM orders WHERE paid = 1 GROUP BY name;",
    '{"id": 17, "tags": ["red", "round"], "price": 2.5, "sold": null}',
    "<p class='note'>Closed on <b>Mondays</b> and in August.</p>",
    "x^2 + y^2 = r^2, hence dy/dx = -x/y where y is not 0",
    "aspirin 500 mg, twice a day, never on an empty stomach",
    "La météo de demain annonce 23 °C à Saint-Étienne, puis de l'orage.",
    "Der Zug nach Köln fährt heute von Gleis 7, etwa zwölf Minuten später.",
    "El gato duerme en la ventana mientras la lluvia golpea el tejado.",
    "Gli studenti hanno finito l'esame prima di mezzogiorno.",
    "Wczoraj kupiliśmy świeży chleb i łyżkę miodu na targu.",
    "Kitap okumayı ve denizde yüzmeyi çok seviyorum.",
    "Сегодня в библиотеке тихо, только часы идут.",
    "Το πλοίο φεύγει στις οκτώ το πρωί.",
    "القطة تنام تحت الشجرة",
    "הספר על השולחן",
    "आज बाज़ार में बहुत भीड़ है",
    "今天下午三点在图书馆见面。",
    "明日の会議は十時からです。",
    "내일은 비가 올 것 같아요.",
    "🐟🐟🐟 see you at the pier 🎣",
    "asdf qwer zxcv lorem ipsum dolor",
    "Hei, hva koster billetten?",
    "Jag har glömt nycklarna hemma igen.",
    "Hvornår åbner biblioteket om søndagen?",
    "Talvi tuli tänä vuonna varhain, ja järvi jäätyi jo marraskuussa.",
    "De fietsenmaker zegt dat het wiel pas donderdag klaar is.",
    "O comboio das sete foi cancelado por causa do nevoeiro.",
    "¿Cuánto tarda en llegar un paquete a las islas?",
    "Je cherche un appartement de deux pièces, au calme, près d'une école.",
    "Bitte senden Sie mir die Rechnung noch einmal, diesmal als PDF.",
    "Wie kündige ich meinen Vertrag?",
    "Il treno per Bologna parte dal binario quattro.",
    "Câte zile de concediu mai am anul acesta?",
    "Kolik stojí jízdenka do Brna a zpět?",
    "Kde môžem nabiť telefón?",
    "Az eső miatt elmaradt a délutáni mérkőzés.",
    "Vlak kasni dvadeset minuta zbog radova na pruzi.",
    "Как восстановить пароль, если почта больше не работает?",
    "У музеї відкрили виставку старих карт.",
    "Автобусът спира точно пред болницата.",
    "Πόσο κοστίζει το εισιτήριο για παιδιά;",
    "Arabam çalışmıyor, en yakın tamirci nerede?",
    "كيف يمكنني تغيير عنوان البريد الإلكتروني في حسابي؟",
    "מתי יוצאת הרכבת האחרונה לחיפה?",
    "قیمت بلیت قطار چقدر است؟",
    "यह दुकान रविवार को कितने बजे खुलती है?",
    "আজ সকালে নদীতে অনেক নৌকা ছিল।",
    "இந்தப் பேருந்து எங்கே செல்கிறது?",
    "ร้านนี้เปิดกี่โมง",
    "Chuyến xe cuối cùng khởi hành lúc mấy giờ?",
    "Berapa lama perjalanan dari bandara ke pusat kota?",
    "Duka la vitabu liko karibu na soko.",
    "请问最近的地铁站怎么走？",
    "這份合約需要雙方簽字才能生效。",
    "荷物はいつ届きますか。",
    "환불은 며칠이나 걸리나요?",
    "გამარჯობა, სად არის სადგური?",
    "Բարև, ինչպե՞ս եք։",
    "npm ERR! missing script: build",
    "git rebase --onto main topic~3 topic",
    "SyntaxError: unexpected end of input at line 214, column 7",
    "0.0031, 0.0047, 0.0012, 0.0098, -0.0005",
    "ISBN 978-0-00-000000-2, 3rd ed., 412 pp.",
    "+49 30 1234567, weekdays 9-17",
    "| size | color | stock |\n|---|---|---|\n| M | blue | 14 |\n| L | red | 0 |",
    "wireless headphones noise cancelling under 100",
    "cheap flights lisbon may",
    "symptoms of iron deficiency",
    "difference between mutex and semaphore",
    "query: how tall is the tower",
    "passage: The tower is 96 meters tall and was built of granite in 1874.",
    "Great value, but the zip broke after two weeks. Two stars.",
    "lol that's sooo true 😂😂",
    "@anna pls review by EOD, thx",
    "Re: Re: Fwd: minutes of the meeting on 14 March",
    "The court dismissed the appeal.",
    "Serve chilled. Contains nuts and sulphites.",
    "To be, or not to be sold: that is written on the label.",
    "Shoals of herring turn as one, though nobody gives the order; each fish answers only to its nearest neighbours.",
    "def answer(question: str) -> int:\n    # as computed over seven and a half million years\n    return 42\n",
    "Dear Ms Okafor, thank you for your letter of 3 May. We are sorry that the lamp arrived broken, and will send "
    "another one at no cost. Please keep the box until our driver calls.",
    "The patient, a 54-year-old man, reported pain in the left knee after running. X-rays showed no fracture; rest and "
    "ice were advised, with another visit in three weeks.",
    "1. Switch the boiler off. 2. Wait until the gauge reads below 0.5 bar. 3. Open valve A, then valve B. 4. If water "
    "keeps running, close both and call the number on the lid.",
    "Shares of the three largest shipping lines fell by 4.2 %, 3.9 % and 1.1 % on Tuesday, after freight rates between "
    "Shanghai and Rotterdam had lost a fifth of their value within a month. Analysts had expected the opposite.",
    "Whereas the Seller owns the vessel and the Buyer wishes to acquire it, the parties agree that title shall pass on "
    "payment in full, that the Buyer bears all costs of delivery, and that any dispute shall be settled by a court at "
    "the Seller's place of business, whose judgment both parties accept as final.",
    "When the lighthouse keeper's daughter came back after eleven winters, the stairs were the same hundred and nine, "
    "but her knees counted them differently. At the top the lamp had given way to a small machine that blinked without "
    "wonder. She sat beside it until the boats went out.",
)

LONGEST = " ".join(TEXTS[::-1])
"""Long enough to be truncated by most models: the comparison at the model's full length."""


@cache
def load_sentence_pairs() -> tuple[tuple[str, str], ...]:
    """Return sentences with five others each: the same meaning, a related one, the opposite, an unrelated one. Reads a
    file, so do not call it on the event loop."""
    lines = Path(__file__).with_name("sentence_pairs.tsv").read_text(encoding="utf-8").splitlines()
    return tuple((first, second) for first, second in (line.split("\t") for line in lines))


def load_single_texts() -> tuple[str, ...]:
    """Return texts for models that read one text at a time. Reads a file, as `load_sentence_pairs`."""
    pairs = load_sentence_pairs()
    groups = {first: [second for _, second in some] for first, some in groupby(pairs, key=lambda pair: pair[0])}
    sentences = dict.fromkeys(sentence for pair in pairs for sentence in pair)
    return (*TEXTS, *sentences, *(" ".join((first, *others)) for first, others in groups.items()))


def load_text_pairs() -> tuple[tuple[str, str], ...]:
    """Return pairs for models that read two texts together: equal ones, neighbors, and a short one with a long one. A
    cross-encoder scores the first kind highest and the last kind lowest, so they span the range of real scores. Reads a
    file, as `load_sentence_pairs`."""
    return (
        *load_sentence_pairs()[::2],
        *((text, text) for text in TEXTS[::3]),
        *pairwise(TEXTS),
        *zip(TEXTS[::2], TEXTS[-1:20:-2], strict=False),
    )
