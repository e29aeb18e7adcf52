-- Sends each line of a file as a JSON body, once: wrk.lua FILE PATH THREADS. Prints the first response that was
-- not a 200, and one line of JSON at the end.
-- Each thread has an equal part of the file to itself, so no two threads send the same line. Lines are read as they
-- are sent: wrk starts a thread before it prepares the next one, so a long preparation would distort the rate.

local threads = {}

function setup(thread)
  thread:set("number", #threads)
  table.insert(threads, thread)
end

function init(args)
  sent, repeated, refused = 0, 0, 0
  wrk.method = "POST"
  wrk.path = args[2]
  wrk.headers["Content-Type"] = "application/json"
  file = assert(io.open(args[1], "rb"))
  local size = file:seek("end")
  first, last = line_start(size * number / args[3]), line_start(size * (number + 1) / args[3])
  file:seek("set", first)
  position = first
end

-- The first line that starts at `offset` or behind it.
function line_start(offset)
  if offset < 1 then
    return 0
  end
  file:seek("set", math.floor(offset) - 1)
  file:read("*l")
  return file:seek()
end

function request()
  if position >= last then
    repeated = repeated + 1
    file:seek("set", first)
    position = first
  end
  local line = file:read("*l")
  position = position + #line + 1
  sent = sent + 1
  return wrk.format(nil, nil, nil, line)
end

function response(status, headers, body)
  if status ~= 200 then
    refused = refused + 1
    refusal = refusal or status .. " " .. body:sub(1, 300):gsub("%c", " ")
  end
end

function done(summary, latency)
  local sent, repeated, refused = 0, 0, 0
  for _, thread in ipairs(threads) do
    sent = sent + thread:get("sent")
    repeated = repeated + thread:get("repeated")
    refused = refused + thread:get("refused")
    if thread:get("refusal") then
      io.write("\nREFUSED " .. thread:get("refusal"))
    end
  end
  local e = summary.errors
  io.write(string.format(
    '\nRESULT {"requests":%d,"seconds":%.6f,"sent":%d,"repeated":%d,"p50":%.3f,"p90":%.3f,"p99":%.3f,"p99.9":%.3f,'
    .. '"max":%.3f,"errors":%d,"connect":%d,"read":%d,"write":%d,"timeout":%d,"refused":%d}\n',
    summary.requests, summary.duration / 1e6, sent, repeated,
    latency:percentile(50) / 1e3, latency:percentile(90) / 1e3, latency:percentile(99) / 1e3,
    latency:percentile(99.9) / 1e3, latency.max / 1e3,
    e.connect + e.read + e.write + e.timeout + refused,
    e.connect, e.read, e.write, e.timeout, refused))
end
